"""What all tests share: a real S3 server, and a tiny dataset with states that are easily made again."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.seaweed import NoServer, seaweedfs


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Endpoint of a SeaweedFS that is up; AWS_* of this process point at it. Anybody may read its bucket `public`."""
    try:
        with seaweedfs("statehouse", anonymous="public") as endpoint:
            yield endpoint
    except NoServer as error:
        pytest.skip(str(error))


@pytest.fixture(params=["local", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a dataset: a folder, and a prefix on the S3 server."""
    if request.param == "local":
        return str(tmp_path / "dataset")
    request.getfixturevalue("s3_server")
    return f"s3://statehouse/{uuid.uuid4().hex}"
