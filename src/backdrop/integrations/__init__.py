"""Shells for other libraries, one module or package for each; importing `backdrop` imports none of them."""
