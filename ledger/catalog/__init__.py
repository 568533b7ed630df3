"""The SQL catalog: what was committed, in which order, and where it lies.

One transaction of it is the commit point of an append. `tables` declares it, `engine` opens it,
`records` are what it gives back, `commit` appends, `queries` read, `allocate` gives out numbers.
"""
