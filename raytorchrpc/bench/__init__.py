"""``raytorchrpc bench``: times the links between actors, side by side, on the machine at hand.

| module | holds |
|---|---|
| ``rows`` | the rows of the tables: links and their variants, peers, limits; data only |
| ``cases`` | what is measured: sizes and patterns, and the user's options |
| ``site`` | what a host, or a pair of hosts, can do; why a row cannot run there |
| ``links``, ``actors`` | inside the actors: the ways to reach a peer, and the loops that measure them |
| ``teams`` | in the driver: starting, joining, calling and ending the actors of a row |
| ``schedule``, ``run`` | the order of measurements, within memory and time; a whole run |
| ``results``, ``fit`` | results and the field's published figures as data, the fitted line |
| ``tables``, ``plots`` | results for people |

A sample is one tensor in one direction and an acknowledgement: a call with a tensor argument that returns None. The
actors of every row, including those for comparison, have the environment of ``raytorchrpc.runtime_env()``.
"""
