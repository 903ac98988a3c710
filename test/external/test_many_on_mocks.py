"""200 random schedules on each mock, as test/unit/test_many.py runs the first 5. They take ten minutes, so they are run by hand:
  .venv/bin/python -m pytest test/external/test_many_on_mocks.py"""
import pytest
from unit.test_many import Mocked, mocked  # noqa: F401

@pytest.mark.parametrize("seed", range(200))
def test_schedules(mocked: Mocked, seed: int): mocked.schedule(seed)  # noqa: F811
