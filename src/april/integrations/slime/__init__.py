"""slime with active partial rollouts: `--rollout-function-path april.integrations.slime.rollout` and
`--data-source-path april.integrations.slime.DataSource`.
"""

try:
    from april.integrations.slime.data_source import DataSource, rollout
except ImportError as error:
    raise ImportError(
        f"april's integration was written for slime 0.3.1, which is installed from its source "
        f"(https://github.com/THUDM/slime), and cannot import what it needs of it: {error}",
        name=error.name,
    ) from None

__all__ = ["DataSource", "rollout"]
