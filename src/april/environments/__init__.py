"""What a user writes for agents: environments, tools, and the bridge between their text and the policy's tokens."""
