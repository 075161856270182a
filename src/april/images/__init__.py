"""Images of prompts: where they are stored, how many placeholders each has, and what a model computes from them."""
