"""The stack as real commits: made in a checkout, exported, linted, and taken back from there."""

from fork.series.absorb import absorb
from fork.series.branch import commits, export
from fork.series.form import lint, put_in_form
from fork.series.remarks import review
from fork.series.table import table
