"""Gateway for programs: the policy behind the APIs of OpenAI and Anthropic, and the programs that use them.

`server.py` serves all episodes of a run. `chat_completions.py`, `responses.py` and `anthropic_messages.py` translate
one API each into the types of `april.rollout.episodes.turns`. `agent.py` runs programs.
"""
