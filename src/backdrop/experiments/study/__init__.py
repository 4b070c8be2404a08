"""Studies on Optuna: many trials, on one machine or many, none of them lost and none run twice.

`plan.py` says what a study consists of, `study.py` keeps its trials and the rules by which they are handed out,
`worker.py` works through them. `storage.py`, `journal.py` and `database.py` are where they lie, `alive.py` tells dead
workers, `workers.py` starts several, `interrupts.py` lets them stop, `remains.py` clears up after them; `repair.py`
rebuilds a damaged journal. `tune.py` is the search, `archive.py` keeps a study in one
file, `lookup.py` finds studies.
"""
