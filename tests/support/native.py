"""Settings of the C library and of torch's threads, which tests change."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from forerun.csrc.library import library


def native_settings() -> Iterator[None]:
    """Restore torch's number of threads and the library's best variant after each test.

    A module makes it an automatic fixture for its own tests. Hypothesis refuses other fixtures that
    run once for all examples of a test.
    """
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    library().fr_select(b"")
