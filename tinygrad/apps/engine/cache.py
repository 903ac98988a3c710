"""Whose each page of the cache is. A page holds the rows of PAGE neighbouring tokens of a sequence, in every block of the model.

  table   the pages of one sequence, in their order
  tree    full pages by their tokens, below the page before them: what a later sequence that begins alike shares instead of computing it again

A page is free, or it is held: by tables, by the tree, or by both. A sequence writes only pages that its table alone holds. A page enters the tree
when its last row is written, and is never written again. The last page of a sequence that ended is not full as a rule: it is its parent's `tail`, and
whoever goes on with its tokens takes it out of the tree, to write on in it.

Whoever holds a page of the tree holds the pages above it, and lets go of it first. So `idle`, the pages that the tree alone holds in the order in
which they were let go of, has every page before its parent: the first is a leaf, and the least recently used."""
from __future__ import annotations
from collections import Counter
from dataclasses import dataclass, field
from typing import Iterable, Iterator
from tinygrad.nn.step import PAGE

@dataclass(eq=False)
class Node:
  """A page of the tree. tokens: those whose rows it holds; PAGE of them, fewer in a tail. The root has none, and no page."""
  tokens: tuple[int, ...] = ()
  page: int = 0
  parent: Node|None = None
  children: dict[tuple[int, ...], Node] = field(default_factory=dict)
  tail: Node|None = None

@dataclass(eq=False)
class Table:
  """The pages that a sequence holds. twins: where the tree has another page of the same tokens, by index in `pages`: held too, as a parent is.
  node: the last page of the path in the tree, None for the root; depth: how many pages the path has."""
  pages: list[int] = field(default_factory=list)
  twins: dict[int, int] = field(default_factory=dict)
  node: Node|None = None
  depth: int = 0

def alike(ids:list[int], rows:int, other:list[int]) -> bool:
  """Whether the page of ids behind what is known of them, so many rows, will be one of other's, too: who waits for it need not compute it"""
  end = (rows // PAGE + 1) * PAGE
  return end < len(ids) and ids[:end] == other[:end]
def pages_for(rows:int) -> int: return -(-rows // PAGE)

class Pool:
  """`pages` pages, of which page 0 is nobody's: what a table does not name is written there."""
  def __init__(self, pages:int):
    self.pages = pages
    self._empty()
  def _empty(self) -> None:
    self.free = list(range(self.pages - 1, 0, -1))
    self.holders = [0] * self.pages   # of each page: how many tables, and one for the tree
    self.root = Node()
    self.nodes: dict[int, Node] = {}  # the tree's, by page
    self.idle: dict[int, Node] = {}   # pages that the tree alone holds, least recently used first

  @property
  def rows(self) -> int:
    """What a sequence can have, alone"""
    return (self.pages - 1) * PAGE
  @property
  def available(self) -> int:
    """Pages that can be allocated"""
    return len(self.free) + len(self.idle)

  # ---- pages ----
  def allocate(self, table:Table, count:int) -> bool:
    """Appends `count` pages to the table, evicting the least recently used of the tree as need be. False, and nothing done, where there are fewer."""
    if count > self.available: return False
    while len(self.free) < count: self._free(next(iter(self.idle)))
    pages = [self.free.pop() for _ in range(count)]
    for page in pages: self.holders[page] = 1
    table.pages += pages
    return True

  def match(self, ids:list[int]) -> tuple[Table, int]:
    """A table of the pages that hold the longest known beginning of ids, and how many rows of them that is"""
    table, node, rows = Table(), self.root, 0
    while (child := node.children.get(tuple(ids[rows:rows + PAGE]))) is not None:
      self._hold(child.page)
      table.pages.append(child.page)
      table.node, table.depth, node, rows = child, table.depth + 1, child, rows + PAGE
    if (tail := node.tail) is not None:
      same = next((i for i, (a, b) in enumerate(zip(tail.tokens, ids[rows:])) if a != b), min(len(tail.tokens), len(ids) - rows))
      if 2 * same >= len(tail.tokens):  # else more is lost than won, as the rest will be written over
        self._detach(tail.page)
        table.pages.append(tail.page)
        rows += same
    return table, rows

  def insert(self, table:Table, ids:list[int], rows:int) -> None:
    """What is full by now enters the tree: pages of the first `rows` of ids, all written. An equal page that is there already stays there, and the
    table keeps its own"""
    for i in range(table.depth, rows // PAGE):
      node, page, tokens = table.node or self.root, table.pages[i], tuple(ids[i * PAGE:(i + 1) * PAGE])
      if (child := node.children.get(tokens)) is None: child = node.children[tokens] = self._enter(Node(tokens, page, node))
      elif child.page != page:
        self._hold(child.page)
        table.twins[i] = child.page
      table.node, table.depth = child, i + 1

  def release(self, table:Table, ids:list[int], rows:int) -> None:
    """Gives the table's pages back; the tree keeps the first `rows` of ids while there is room"""
    self.insert(table, ids, rows)
    full = rows // PAGE
    if rows % PAGE and table.depth == full:
      node = table.node or self.root
      if node.tail is not None: self._free(node.tail.page)
      node.tail = self._enter(Node(tuple(ids[full * PAGE:rows]), table.pages[full], node))
    for i in reversed(range(len(table.pages))):
      self._drop(table.pages[i])
      if i in table.twins: self._drop(table.twins[i])
    table.__init__()  # type: ignore[misc]

  def _hold(self, page:int) -> None:
    self.holders[page] += 1
    self.idle.pop(page, None)
  def _drop(self, page:int) -> None:
    self.holders[page] -= 1
    if not self.holders[page]: self.free.append(page)
    elif self.holders[page] == 1 and page in self.nodes: self.idle[page] = self.nodes[page]

  # ---- the tree ----
  def _enter(self, node:Node) -> Node:
    self.nodes[node.page] = node
    self.holders[node.page] += 1
    return node
  def _detach(self, page:int) -> None:
    """An idle leaf leaves the tree; who calls has the page then"""
    node = self.nodes.pop(page)
    del self.idle[page]
    assert node.parent is not None and not node.children and node.tail is None
    if node.parent.tail is node: node.parent.tail = None
    else: del node.parent.children[node.tokens]
  def _free(self, page:int) -> None:
    self._detach(page)
    self._drop(page)

  def reset(self, tables:Iterable[Table]) -> None:
    """An empty tree, and as held what these tables name"""
    self._empty()
    for table in tables:
      table.twins, table.node, table.depth = {}, None, 0
      for page in table.pages: self.holders[page] += 1
    self.free = [page for page in self.free if not self.holders[page]]

  # ---- whether it is whole ----
  def _walk(self, node:Node) -> Iterator[Node]:
    todo = [node]
    while todo:
      todo += (below := [*(n := todo.pop()).children.values(), *([n.tail] if n.tail else [])])
      for child in below:
        if child.parent is n: yield child
  def fault(self, tables:Iterable[Table]) -> str:
    """What is wrong, given every table that holds pages; empty where each page but 0 is free or held, never both, and its holders are counted"""
    tables, nodes = list(tables), list(self._walk(self.root))
    if {n.page: n for n in nodes} != self.nodes or len(nodes) != len(self.nodes): return "the tree's pages are not those that it is said to have"
    if any(n.parent.children.get(n.tokens) is not n and n.parent.tail is not n for n in nodes): return "a page of the tree is not found by its tokens"
    if any(len(n.tokens) != PAGE and (n.parent.tail is not n or n.children or n.tail) for n in nodes): return "a page that is not full is no tail"
    holders = Counter(page for t in tables for page in [*t.pages, *t.twins.values()]) + Counter(list(self.nodes))
    if wrong := [p for p in range(self.pages) if holders[p] != self.holders[p]]:
      return f"page {wrong[0]} has {holders[wrong[0]]} holders, {self.holders[wrong[0]]} are counted"
    if holders[0]: return "page 0 is held"
    if sorted(self.free) != [p for p in range(1, self.pages) if not holders[p]]: return "the free pages are not those that nobody holds"
    if set(self.idle) != {p for p in self.nodes if holders[p] == 1}: return "the idle pages are not those that the tree alone holds"
    place = {p: i for i, p in enumerate(self.idle)}
    if any(place.get(n.parent.page, len(place)) < place[p] for p, n in self.idle.items()): return "a page is to be evicted before one below it"
    for t in tables:
      path, node = set(), t.node
      while node is not None and node is not self.root: path, node = path | {node.page}, node.parent
      if len(path) != t.depth or not path <= {*t.pages, *t.twins.values()}: return "a table does not hold the pages of its path"
    return ""
  def check(self, tables:Iterable[Table]) -> None:
    """Raises AssertionError unless the pool is whole"""
    if fault := self.fault(tables): raise AssertionError(fault)
