"""Reports: what came of a study, as a page, a text, tables or pictures.

`write.py` puts them together. `statistics.py` has means and intervals over seeds, `paper_results.py` the paper's
numbers; what it says in words, and whether that holds, is in `results/claims.py` of the repository. `tables.py`,
`headline.py` and `wording.py` are the words, `figures.py`, `pairs.py`, `curves.py` and `drawing.py` the pictures,
`exports.py` the CSV files.
"""
