"""Reports: what came of a study, as a page, a text, tables or pictures.

`write.py` puts them together. `statistics.py` has means and intervals over seeds. `tables.py`, `headline.py` and
`wording.py` are the words, with the paper's Table 2; what it says in words, and whether that holds, is in
`results/claims.py` of the repository. `figures.py` and `drawing.py` are the pictures, `exports.py` the CSV
files.
"""
