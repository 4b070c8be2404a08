"""What is no test of its own. Settings for the whole suite are in the conftest.py above this folder."""

collect_ignore = ["sound"]  # cases that a test imports: looked through for doctests they would stand in the table twice
