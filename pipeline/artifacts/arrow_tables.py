"""Read the rows of Parquet files, and of the Arrow files of a data set of Hugging Face."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from pipeline.errors import ConfigError, DataError, Interrupted, UserError

PARQUET, ARROW = ".parquet", ".arrow"
_BATCH_ROWS = 1000
_BatchesOf: TypeAlias = Callable[[list[str]], Iterable[Any]]
"""Returns batches of rows, of these columns."""


def table_rows(path: Path, columns: Collection[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the cells of every row, of those of these columns that the file has.

    If it has none of them, rows have the names of all columns, without values. Memory is bounded.

    Raises:
        ConfigError: The package pyarrow is missing.
        DataError: The file cannot be read.
    """
    with _told(path):
        open_table = _open_parquet if path.suffix == PARQUET else _open_arrow
        with open_table(path) as (names, batches_of):
            present = [name for name in names if name in columns]
            for batch in batches_of(present):
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    part = batch.slice(start, _BATCH_ROWS)
                    if present:
                        yield from part.to_pylist()
                    else:
                        yield from [dict.fromkeys(names)] * part.num_rows


@contextmanager
def _open_parquet(path: Path) -> Iterator[tuple[list[str], _BatchesOf]]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        yield (
            table.schema_arrow.names,
            lambda columns: table.iter_batches(batch_size=_BATCH_ROWS, columns=columns),
        )


@contextmanager
def _open_arrow(path: Path) -> Iterator[tuple[list[str], _BatchesOf]]:
    import pyarrow

    with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as table:
        yield table.schema.names, lambda columns: (batch.select(columns) for batch in table)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn any error of pyarrow into a DataError, because its errors share no class."""
    kind = "Parquet" if path.suffix == PARQUET else "Arrow"
    try:
        yield
    except (UserError, Interrupted):
        raise
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow ({error}). Run pip install 'mmnmt[parquet]'."
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{path} is not a complete {kind} file ({reason}). Fetch it again."
        ) from error
