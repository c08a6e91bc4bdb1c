"""The scan: every row is read once, by any number of jobs, and assigned to a shard or left out.

Reading and checking text is far cheaper than tokenising it, and what becomes of a row depends on all others:

    units.py       the sources cut into units; any job takes the next one that is free
    parts.py       a unit's rows as a part on disk, in Parquet: hash, length and reason of each
    piece.py       what a worker does with a piece of text
    merge.py       one job's work when all parts are there: all rows -> the plan, by selection.py
    near.py        which rows resemble each other
    assignment.py  the plan, in Parquet: which rows each shard takes
    planning.py    in what order all this happens, beside the tokenizer and what else jobs share

Units depend on the sources alone, never on the jobs, and decisions on the rows alone: the bytes are the same
for any number of jobs. Memory does not grow with the text, but for 48 bytes a piece (256 KiB of text).
"""
