"""What tests of the deployment share."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def node_env() -> dict[str, str]:
    """deploy/node.env by name."""
    lines = (ROOT / "deploy" / "node.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
