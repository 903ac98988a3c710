"""The pool of pages: who holds what, what is shared, what is evicted"""
from __future__ import annotations
import random
import pytest
from tinygrad.apps.engine import cache
from tinygrad.apps.engine.cache import Pool, Table

@pytest.fixture(autouse=True)
def page(monkeypatch): monkeypatch.setattr(cache, "PAGE", 4)

def ids_of(text: str) -> list[int]: return [ord(c) for c in text]
def computed(pool: Pool, text: str) -> Table:
  """A table whose pages hold all of the text's rows"""
  table, rows = pool.match(ids_of(text))
  assert pool.allocate(table, cache.pages_for(len(text)) - len(table.pages))
  pool.insert(table, ids_of(text), len(text))
  return table
def known(pool: Pool, text: str) -> int:
  """How many rows of it the pool has, looked up and given back"""
  table, rows = pool.match(ids_of(text))
  pool.release(table, ids_of(text), rows)
  return rows

def test_pages_are_allocated_once():
  pool, a, b = Pool(6), Table(), Table()
  assert pool.allocate(a, 3) and pool.allocate(b, 2) and not pool.allocate(b, 1) and pool.allocate(b, 0)
  assert sorted(a.pages + b.pages) == [1, 2, 3, 4, 5] and pool.available == 0
  pool.check([a, b])
  pool.release(a, [], 0)
  assert pool.available == 3 and a.pages == []
  pool.check([b])

def test_whole_pages_are_shared():
  pool = Pool(20)
  a = computed(pool, "abcdefghij")
  b, rows = pool.match(ids_of("abcdefgh??"))
  assert rows == 8 and b.pages == a.pages[:2] and [pool.holders[p] for p in a.pages] == [3, 3, 1]
  c, rows = pool.match(ids_of("abcdefg"))
  assert rows == 4 and c.pages == a.pages[:1]
  assert pool.match(ids_of("bcde"))[1] == pool.match(ids_of("abc"))[1] == pool.match([])[1] == 0
  pool.check([a, b, c])
  for t in (a, b, c): pool.release(t, [], 0)
  pool.check([])
  assert len(pool.idle) == 2 and pool.available == 19

def test_a_page_is_known_below_its_parent_alone():
  pool = Pool(20)
  for text in ("aaaabbbb", "bbbbaaaa"): pool.release(computed(pool, text), ids_of(text), 8)
  assert known(pool, "aaaabbbbcccc") == 8 and known(pool, "bbbbbbbb") == 4 and known(pool, "aaaaaaaa") == 4
  pool.check([])

def test_a_page_that_is_known_already():
  """Each keeps its own; the tree has the first, and what comes below holds it"""
  pool = Pool(20)
  a, b = Table(), Table()
  for t in (a, b): assert pool.allocate(t, 3)
  for t, text in ((a, "aaaabbbbcccc"), (b, "aaaabbbbdddd")): pool.insert(t, ids_of(text), 12)
  assert b.twins == {0: a.pages[0], 1: a.pages[1]} and not a.twins
  pool.check([a, b])
  pool.release(a, ids_of("aaaabbbbcccc"), 12)
  pool.check([b])
  pool.release(b, ids_of("aaaabbbbdddd"), 12)
  pool.check([])
  assert len(pool.idle) == 4 and known(pool, "aaaabbbbdddd!") == known(pool, "aaaabbbbcccc!") == 12

def test_the_least_recently_used_leaf_is_evicted():
  pool = Pool(6)
  for text in ("aaaabbbb", "aaaacccc", "dddd"): pool.release(computed(pool, text), ids_of(text), len(text))
  known(pool, "aaaabbbb!")
  t = Table()
  for count, left in ((1, (8, 8, 4)), (1, (8, 4, 4)), (1, (8, 4, 0)), (1, (4, 4, 0)), (1, (0, 0, 0))):
    assert pool.allocate(t, count)
    assert tuple(n.tokens for n in pool.idle.values()).count((97,) * 4) <= 1
    pool.check([t])
    held = [sum(tuple(ids_of(text[i:i + 4])) in {n.tokens for n in pool.nodes.values()} for i in range(0, len(text), 4)) * 4
            for text in ("aaaabbbb", "aaaacccc", "dddd")]
    assert tuple(held) == left
  assert not pool.allocate(t, 1)

def test_what_is_held_is_not_evicted():
  pool = Pool(5)
  a = computed(pool, "aaaabbbb")
  pool.release(computed(pool, "cccc"), ids_of("cccc"), 4)
  t = Table()
  assert pool.available == 2 and not pool.allocate(t, 3) and len(pool.idle) == 1  # nothing is evicted in vain
  assert pool.allocate(t, 2)
  pool.check([a, t])
  assert known(pool, "aaaabbbb!") == 8

def test_the_last_page_serves_who_goes_on():
  pool = Pool(20)
  pool.release(computed(pool, "aaaabb"), ids_of("aaaabb"), 6)
  pool.check([])
  t, rows = pool.match(ids_of("aaaabbcc"))
  assert rows == 6 and pool.holders[t.pages[1]] == 1 and t.pages[1] not in pool.nodes  # its alone: it may be written
  assert known(pool, "aaaabbcc") == 4
  pool.check([t])
  pool.release(t, ids_of("aaaabbc"), 7)
  pool.release(computed(pool, "aaaadd"), ids_of("aaaadd"), 6)
  pool.check([])
  assert known(pool, "aaaabbc") == 4 and known(pool, "aaaadd") == 6                    # one a page, the newest
  pool.release(computed(pool, "aaaaeee"), ids_of("aaaaeee"), 7)
  assert known(pool, "aaaaefff") == 4 and known(pool, "aaaaeeff") == 6                 # not where more would be lost than won
  pool.check([])

def test_reset():
  pool = Pool(20)
  a, b = computed(pool, "aaaabbbb"), computed(pool, "aaaacc")
  pool.release(computed(pool, "dddd"), ids_of("dddd"), 4)
  pool.reset([a, b])
  pool.check([a, b])
  assert not pool.nodes and known(pool, "aaaabbbb!") == 0 and pool.holders[a.pages[0]] == 2
  pool.release(a, ids_of("aaaabbbb"), 8)
  pool.release(b, ids_of("aaaacc"), 6)
  pool.check([])
  assert known(pool, "aaaabbbb!") == 8 and known(pool, "aaaacc") == 6

def test_random_use():
  rng = random.Random(0)
  for _ in range(60):
    pool, held = Pool(rng.randint(3, 30)), []
    for _ in range(150):
      if rng.random() < .5:
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 30)))
        table, rows = pool.match(ids_of(text))
        if pool.allocate(table, cache.pages_for(len(text)) - len(table.pages)): held.append((table, ids_of(text), rows))
        else: pool.release(table, ids_of(text), rows)
      elif held:
        table, ids, rows = held.pop(rng.randrange(len(held)))
        rows = rng.randint(rows, len(ids))
        if rng.random() < .5:
          pool.insert(table, ids, rows)
          held.append((table, ids, rows))
        else: pool.release(table, ids, rng.choice((0, rows)))
      pool.check([t for t, _, _ in held])
    for table, ids, rows in held: pool.release(table, ids, rows)
    pool.check([])
    assert pool.available == pool.pages - 1

# what check() finds
FAULTS = {
  "a page lost": lambda pool, t: pool.free.pop(),
  "a page twice free": lambda pool, t: pool.free.append(pool.free[0]),
  "held and free": lambda pool, t: pool.free.append(t.pages[0]),
  "page 0 free": lambda pool, t: pool.free.append(0),
  "a reference too many": lambda pool, t: pool._hold(t.pages[-1]),
  "a reference forgotten": lambda pool, t: t.pages.pop(),
  "a child forgotten": lambda pool, t: pool.root.children.clear(),
  "evicted too soon": lambda pool, t: pool.idle.update({p: pool.idle.pop(p) for p in [next(iter(pool.idle))]}),
  "never evicted": lambda pool, t: pool.idle.popitem(),
  "a path not held": lambda pool, t: setattr(t, "node", None),
}
@pytest.mark.parametrize("fault", FAULTS)
def test_check_finds(fault: str):
  pool = Pool(20)
  t = computed(pool, "aaaabbbbcc")
  pool.release(computed(pool, "ddddeeeeffff"), ids_of("ddddeeeeffff"), 12)
  pool.check([t])
  FAULTS[fault](pool, t)
  with pytest.raises(AssertionError): pool.check([t])
