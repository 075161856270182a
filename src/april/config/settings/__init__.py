"""The sections of a recipe: every setting of a run, its type, its range and its default. One section per file.

Invariant: the type of a setting holds its range (`ranges`) and the docstring of its section holds its meaning. Both
have no other definition.
"""
