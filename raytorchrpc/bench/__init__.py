"""``raytorchrpc bench``: times the links between actors, side by side, on the machine at hand.

| module | holds |
|---|---|
| ``cases`` | a case (contestants, sizes, what a turn does), and how its contestants take turns |
| ``results``, ``tables``, ``plots`` | the file of a run, and the field's published figures; tables; pictures |
| ``patterns``, ``actors`` | what members do in a turn; inside the actors: each way to reach a peer, and the loops |
| ``site``, ``contestants`` | what hosts can do; every link that is compared, and why it cannot run there |
| ``options`` | the user's options |
| ``teams``, ``runs`` | in the driver: the actors of a contestant; a whole run |

A sample is one tensor in one direction and an acknowledgement: a call with a tensor argument that returns None. The
actors of every contestant have the environment of ``raytorchrpc.runtime_env()``.
"""
