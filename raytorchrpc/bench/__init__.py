"""``raytorchrpc bench``: every road between two processes, timed side by side on whatever machine there is.

| module | what it does |
|---|---|
| ``rows`` | what is measured: the lanes and their variants, the peers, the limits; data only |
| ``site`` | what a machine, or a pair of them, can do; why a row cannot run there |
| ``options`` | what a user may ask for, read and checked before anything starts |
| ``roads``, ``ends`` | inside the actors: one sample of each road, blocks of samples |
| ``pairs`` | the driver's side of the actors: start, join, ask, end |
| ``measuring`` | which sample when: warm-up, turns, repeats, memory, time |
| ``results``, ``fit``, ``published`` | what came out, as data; the line through it; the field's published figures |
| ``tables``, ``markdown``, ``plots`` | what came out, for people |

A sample is one tensor one way and an acknowledgement: a call with a tensor argument that returns None. The actors of
every row, those for comparison too, have the environment of ``raytorchrpc.runtime_env()``.
"""
