"""SGLang as an engine: requests, answers, servers that are started and looked after.

Nothing here imports sglang: it runs in processes of its own, maybe in an environment apart.
"""
