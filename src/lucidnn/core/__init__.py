"""The machine: problems, engines, choice, plans. It knows no operation and no kernel.

Reading order: `descriptor`, `operation`, `problem` (what is asked), `target` (for which hardware), `engine`, `registry`
(who can answer), `heuristics`, `timing`, `store` (how good the answers are), `plan` (the choice and the launch).
Nothing here imports torch, triton or numba when it is loaded.
"""
