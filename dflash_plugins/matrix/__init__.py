"""The compatibility matrix: which pair ran on which engine version, and how a pair at hand relates to those rows.

rows.py       what a row holds, and the published schema
book.py       compat_matrix.yaml, read and written
standing.py   tested, untested or known-bad
plan.py       the cells that are to be run, from plan.toml
cell.py       one cell, run inside the environment of its engine
run.py        cells from outside: each in its environment, the row into the book
table.py      the rows for people
"""

from dflash_plugins.matrix.book import read_matrix
from dflash_plugins.matrix.rows import Matrix, MatrixRow
from dflash_plugins.matrix.standing import AtHand, Standing, Status, log_standing, standing_of

__all__ = [
    "AtHand",
    "Matrix",
    "MatrixRow",
    "Standing",
    "Status",
    "log_standing",
    "read_matrix",
    "standing_of",
]
