"""The paper as runnable studies. Needs the extra: `pip install 'torch-backdrop[experiments]'`."""
