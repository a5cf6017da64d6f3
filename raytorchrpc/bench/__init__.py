"""``raytorchrpc bench``: times every transport between two processes, side by side, on the machine at hand.

| module | holds |
|---|---|
| ``rows`` | what is measured: lanes and their variants, peers, limits; data only |
| ``site`` | what a host, or a pair of hosts, can do; why a row cannot run there |
| ``options`` | the user's options, parsed and checked before anything starts |
| ``transports``, ``actors`` | inside the actors: one sample over each transport, batches of samples |
| ``pairs`` | in the driver: starting, joining, calling and ending the actors |
| ``schedule`` | the order of samples: warm-up, turns, repeats, limits of memory and time |
| ``results``, ``fit`` | results and the field's published figures as data, the fitted line |
| ``tables``, ``markdown``, ``plots`` | results for people |

``--pattern`` measures patterns of calls instead of sizes:

| module | holds |
|---|---|
| ``patterns`` | rows, patterns and their cases, and the options; data only |
| ``pattern_actors`` | inside the actors: links to the peers, the measuring loops, context switches and CPU time |
| ``pattern_teams`` | in the driver: the actors of one row, and one measurement by them |
| ``pattern_run`` | the order of measurements: blocks of cases, in which rows take turns |
| ``pattern_results``, ``pattern_tables`` | results as data, and for people |

A sample is one tensor in one direction and an acknowledgement: a call with a tensor argument that returns None. The
actors of every row, including those for comparison, have the environment of ``raytorchrpc.runtime_env()``.
"""
