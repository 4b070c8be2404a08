"""Reports: what came of a study, as a page, a text, tables or pictures.

`write.py` puts them together. `statistics.py` has means and intervals over seeds, `claims.py` and `judging.py` what the
paper says and whether it holds, `paper_results.py` its numbers. `tables.py`, `headline.py` and `wording.py` are the
words, `figures.py`, `pairs.py`, `curves.py` and `drawing.py` the pictures, `exports.py` the CSV files.
"""
