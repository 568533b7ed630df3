"""Temporary."""

from collections.abc import Mapping

import pyarrow as pa


def check_tables(tables: Mapping[str, pa.Table], lookup: object) -> None: ...
