"""The soak of test/external, for some seconds: everything that its clients do is done at least once."""
from __future__ import annotations
import asyncio, random
from external.soak import Client, Seen, actions, asks_of, soak

def test_soak():
  line = asyncio.run(soak(8, 10, Seen(), threads=1))
  assert not line["wrong"], line
  assert line["done"].keys() == actions(Client(0, rng := random.Random(0)), {ask: [] for ask in asks_of(rng)}).keys()
