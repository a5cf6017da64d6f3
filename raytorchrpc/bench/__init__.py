"""``raytorchrpc bench``: times the links between actors, side by side, on the machine at hand.

| module | holds |
|---|---|
| ``cases`` | what is measured: rows (links and their variants), sizes and patterns, the user's options |
| ``site`` | what a host, or a pair of hosts, can do; why a row cannot run there |
| ``links``, ``actors`` | inside the actors: the ways to reach a peer, and the loops that measure them |
| ``teams`` | in the driver: starting, joining, calling and ending the actors of a row |
| ``schedule`` | a whole run: the order of measurements, within memory and time |
| ``results`` | results and the field's published figures as data, the fitted line |
| ``reports`` | results for people: tables, CSV, Markdown, pictures |

A sample is one tensor in one direction and an acknowledgement: a call with a tensor argument that returns None. The
actors of every row, including those for comparison, have the environment of ``raytorchrpc.runtime_env()``.
"""
