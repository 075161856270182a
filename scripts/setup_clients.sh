#!/usr/bin/env bash
# A virtual environment with clients of model APIs, as agents' programs use them: .frameworks/clients by default.
#   scripts/setup_clients.sh [DIR]
#   .frameworks/clients/bin/python -m pytest tests/gateway/clients
source "$(dirname "$0")/environment.sh"
environment "${1:-$root/.frameworks/clients}" scripts/setup_clients.sh
$pip install torch==2.13.0
$pip install --editable "$root[train,agents]"
$pip install "openai-agents>=0.24,<0.25" "pydantic-ai-slim[openai,anthropic]>=2.68,<2.69" "langgraph>=1.2,<1.3" \
    "langchain-openai>=1.7,<1.8" "langchain-anthropic" "mini-swe-agent>=2.4,<2.5" "litellm>=1.110,<1.111" \
    "smolagents[openai]>=1.26,<1.27" "autogen-agentchat>=0.7,<0.8" "autogen-ext[openai]>=0.7,<0.8"
$pip install --no-deps "trl>=1.16,<1.17"  # for its chat templates
$pip install pytest pytest-asyncio pytest-xdist hypothesis
"$env/bin/python" -W ignore -c "import agents, autogen_agentchat, langgraph, litellm, minisweagent, pydantic_ai, smolagents"
ready
