"""What all else stands on: checks of what users pass, the drawing of masks, kernels, and files. Private."""
