"""Templates against jinja2 itself, and against those who write them: whatever a template says, time and memory are bounded."""
import copy, json, subprocess, sys, threading
import jinja2, jinja2.ext, jinja2.sandbox, pytest
from templates import FORMS, GLM, TALKS, VARIABLES, user
from tinygrad.apps.template import MAX_SOURCE, Refusal, Template

def by_jinja(source: str, values: dict) -> str:
  env = jinja2.sandbox.SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
  env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
    x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
  return env.from_string(source).render(copy.deepcopy(values))
def outcome(render, *args):
  """What is rendered, or that it fails."""
  try: return render(*args)
  except Exception as e: return type(e).__name__ if isinstance(e, jinja2.UndefinedError) else "fails"

@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("talk", TALKS)
def test_forms_render_as_in_jinja(form, talk):
  template = Template(FORMS[form])
  for more in VARIABLES:
    values = {"messages": TALKS[talk], "bos_token": "<s>", "add_generation_prompt": True, **more}
    assert outcome(template.render, copy.deepcopy(values)) == outcome(by_jinja, FORMS[form], values)
  assert form != "glm" or talk == "encoded" or "<|assistant|><think>" in template.render({"messages": TALKS[talk], "add_generation_prompt": True})

VALUES = {"x": 3, "s": "Hello wörld", "l": [3, 1, 2], "d": {"b": 1, "a": [1, "2", None], "items": 5}, "n": None, "t": True, "f": 2.5, "e": "",
          "people": [{"name": "Zoe", "age": 3, "in": {"a": 1}}, {"name": "adam", "age": 5}, {"name": "Bob", "age": 3}]}
SAME = """{{ x + 1 }} {{ x - 5 }} {{ x * 2.5 }} {{ x / 2 }} {{ x // 2 }} {{ x % 2 }} {{ x ** 3 }} {{ -x }} {{ +x }} {{ s + s }} {{ l + l }}
{{ s * 2 }} {{ l * 2 }}
{{ s ~ x ~ n ~ l ~ t ~ nothing }}|{{ nothing }}|{{ n }}|{{ t }}|{{ f }}|{{ l }}|{{ d }}|{{ (1, 'a') }}|{{ (1,) }}|{{ {'k': [1, {}]} }}|{{ [] }}
{{ x == 3 }} {{ x != 3 }} {{ 1 < x < 5 }} {{ 1 < x > 5 }} {{ x >= 3 and s }} {{ e or 'empty' }} {{ not l }} {{ 2 in l }} {{ 'b' in d }}
{{ 'ell' in s }} {{ 7 not in l }}
{{ nothing == 1 }} {{ nothing in l }} {{ 1 in nothing }} {{ l == [3, 1, 2] }} {{ [1, 2] < [1, 3] }} {{ 'a' < 'b' }} {{ n == none }}
{{ true == 1 }} {{ nothing == other }}
{{ s[0] }} {{ s[-1] }} {{ s[1:4] }} {{ s[::-1] }} {{ l[0] }} {{ l[9] }}| {{ l[-2:] }} {{ d['a'] }} {{ d.a[1] }} {{ d.c }}|
{{ d['items'] }} {{ s['upper']() }} {{ l.x }}|
{{ d.items() | list }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.get('b') }} {{ d.get('z') }} {{ d.get('z', 7) }}
{{ s.upper() }} {{ s.lower() }} {{ s.title() }} {{ s.split() }} {{ s.split('l') }} {{ s.split('l', 1) }} {{ s.rsplit('l', 1) }}
{{ s.strip('Hd') }} {{ s.replace('l', 'LL') }}
{{ s.replace('l', 'LL', 1) }} {{ s.replace('', '-') }} {{ s.startswith('He') }} {{ s.endswith(('x', 'd')) }} {{ s.find('w') }}
{{ ', '.join(['a', 'b']) }} {{ s.partition(' ') }}
{{ '%s is %d, %.2f, %5s, %%' % (s, x, f, 'r') }} {{ '%s' % s }}
{{ '{} {:>5} {:.1f} {name}'.format(s, x, f, name='n') }} {{ '{{}}{0}{0}'.format(x) }} {{ '%s-%s' | format(x, s) }}
{{ s.removeprefix('Hello') }} {{ 'a\\nb\\n'.splitlines() }}
{{ s | length }} {{ l | count }} {{ d | length }} {{ nothing | length }} {{ l | first }} {{ l | last }} {{ [] | first }}|
{{ s | first }} {{ s | last }} {{ s | list }} {{ d | list }}
{{ l | sort }} {{ l | sort(reverse=true) }} {{ people | sort(attribute='name') | map(attribute='name') | join(',') }}
{{ ['b', 'A', 'c'] | sort }}
{{ ['b', 'A', 'c'] | sort(case_sensitive=true) }} {{ ['b', 'A', 'a', 1, '1', 'b'] | unique | list }}
{{ people | map(attribute='age') | list }} {{ d | dictsort }}
{{ {'b': 1, 'A': 3} | dictsort(by='value', reverse=true) }} {{ people | map(attribute='in.a', default=0) | list }}
{{ l | map('string') | join('+') }}
{{ l | select('odd') | list }} {{ l | reject('equalto', 1) | list }}
{{ people | selectattr('age', 'equalto', 3) | map(attribute='name') | list }} {{ l | select | list }}
{{ people | rejectattr('in') | map(attribute='name') | list }} {{ people | selectattr('in', 'defined') | list | length }}
{{ people | join(', ', attribute='age') }}
{{ l | min }} {{ l | max }} {{ l | sum }} {{ people | sum(attribute='age') }} {{ s | reverse }} {{ l | reverse | list }} {{ -3 | abs }}
{{ (-3) | abs }} {{ 2.567 | round(2) }}
{{ 2.5 | round }} {{ 2.1 | round(method='ceil') }} {{ 2.9 | round(0, 'floor') }} {{ '42' | int }} {{ '4.7' | int }} {{ 'x' | int(5) }}
{{ 'ff' | int(base=16) }} {{ '2.5' | float }}
{{ s | upper }} {{ s | lower }} {{ 'heLLo wOrld-x' | title }} {{ 'heLLo' | capitalize }} {{ '  a ' | trim }}| {{ 'xax' | trim('x') }}
{{ x | string }} {{ s | replace('l', 'L') }}
{{ nothing | default('d') }} {{ e | default('d') }}| {{ e | default('d', true) }} {{ n | d('d', boolean=true) }} {{ nothing | upper }}|
{{ '<a & "b">' | e }} {{ s | safe }}
{{ 'a\\nb\\n\\nc' | indent }} {{ 'a\\nb' | indent(2, true) }} {{ 'a\\n\\nb' | indent(width='> ', first=true, blank=true) }}
{{ d | items | list }} {{ nothing | items | list }}
{{ d | tojson }} {{ d | tojson(indent=2) }} {{ s | tojson(ensure_ascii=true) }} {{ d | tojson(sort_keys=true, separators=(',', ':')) }}
{{ [l, d] | tojson(indent=1) }}
{{ x is defined }} {{ y is defined }} {{ y is undefined }} {{ n is none }} {{ s is string }} {{ l is string }} {{ l is sequence }}
{{ s is sequence }} {{ d is mapping }} {{ l is iterable }}
{{ x is iterable }} {{ x is number }} {{ t is number }} {{ x is integer }} {{ t is integer }} {{ f is float }} {{ t is boolean }}
{{ t is true }} {{ t is false }} {{ x is odd }} {{ x is even }}
{{ x is divisibleby 3 }} {{ x is eq 3 }} {{ x is ne(3) }} {{ x is gt 2 }} {{ x is in l }} {{ s is lower }} {{ 'A' is upper }}
{{ x is sameas x }} {{ x is not none }} {{ range is callable }}
{{ range(3) | list }} {{ range(5, 1, -2) | list }} {{ range(3) }} {{ dict(a=1, b=2) }} {{ dict([['k', 1]]) }} {{ 'yes' if x else 'no' }}
{{ 'yes' if n }}|{{ [1, 2][x > 2] }} {{ {1: 'i', 2: 'j'}[2] }}
{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}
{% for i in l %}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }}{{ loop.changed(i > 1) }};{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }}{% else %}none{% endfor %}{% for i in [] %}{% else %}none{% endfor %}
{% for c in 'ab' %}{{ c }}{% endfor %}{% for k in d %}{{ k }}{% endfor %}
{% for i in range(9) if i % 2 %}{{ i }}{{ loop.last }}{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in l %}{% for j in l %}{{ i }}{{ j }}{{ loop.index }}{% if j == 1 %}{% break %}{% endif %}{% endfor %}{{ loop.index }}{% endfor %}
{% for i in nothing %}{% else %}no{% endfor %}
{% set y = 1 %}{% for i in l %}{% set y = y + i %}{{ y }}{% endfor %}{{ y }}
{% set ns = namespace(y=1) %}{% for i in l %}{% set ns.y = ns.y + i %}{% endfor %}{{ ns.y }}{{ ns.z }}|
{% if x > 5 %}{% set z = 1 %}{% elif x > 2 %}{% set z = 2 %}{% else %}{% set z = 3 %}{% endif %}{{ z }}{% set a, b = [1, 2] %}{{ a }}{{ b }}
{% for i in l %}{% if loop.first %}{% set q = 1 %}{% endif %}{{ q }}|{% endfor %}
{% set block %}<{{ x }}{% set inside = 1 %}>{% endset %}{{ block }}{{ inside }}
{% set block | upper | trim %} a{{ s }} {% endset %}{{ block }}{% filter upper %}{{ s }}{% endfilter %}
{% with a = 5, b = x %}{{ a }}{{ b }}{% endwith %}{{ a }}
{% macro m(a, b=2, c=a) %}[{{ a }}{{ b }}{{ c }}{{ s }}{{ later }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}
{% macro m(a, b) %}[{{ a }}{{ b }}{{ c }}{{ later }}]{% endmacro %}{% set later = 'L' %}{{ m(1) | length }}{{ m(1) }}{{ m(*[7], **{'b': 9}) }}
{% macro down(n) %}{{ n }}{% if n %}{{ down(n - 1) }}{% endif %}{% endmacro %}{{ down(5) }}
{% for i in l %}{% macro inner() %}{{ i }}{% endmacro %}{{ inner() }}{% endfor %}
{% raw %}{{ x }}{% endraw %}{# no #}{{- ' a ' -}} b {%- if t %} c {%- endif +%}
{{ messages.nothing.at.all }}
{{ nothing.at }}
{{ nothing['at'] }}
{{ nothing() }}
{{ nothing + 1 }}
{{ nothing | tojson }}
{{ s() }}
{{ s + 1 }}
{{ x | nosuchfilter }}
{{ x is nosuchtest }}
{{ 1 / 0 }}
{{ x[0] }}|{{ x.y }}|{{ n.y }}|
{{ [1, 'a'] | sort }}
{{ {}[[]] }}|
{{ l[1:2:0] }}
{% set a, b = l %}
{{ m2(1) }}{% macro m2(a) %}{% endmacro %}
{% macro m3(a) %}{% endmacro %}{{ m3(1, 2) }}
{% macro m4(a) %}{% endmacro %}{{ m4(z=2) }}""".split("\n")
@pytest.mark.parametrize("source", SAME)
def test_renders_as_jinja_does(source):
  assert outcome(lambda: Template(source).render(copy.deepcopy(VALUES))) == outcome(by_jinja, source, VALUES)

def test_most_snippets_render():
  """The comparison above is of texts, not of failures."""
  assert sum(outcome(by_jinja, s, VALUES) not in ("fails", "UndefinedError") for s in SAME) == len(SAME) - 17

TWICE = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}"
PAIRS = TWICE % ("(1,)", "(ns.x, ns.x)")
LONG = "{% set x = 'a' * 30000 %}{% for i in range(500) %}"
PAIR_USES = ["{{ ns.x }}", "{{ {}.get(ns.x) }}", "{{ {}[ns.x] }}", "{{ ns.x in {} }}", "{{ [ns.x] | tojson }}", "{{ '%s' % ns.x }}",
             "{{ ns.x ~ 'a' }}", "{{ '{}'.format(ns.x) }}", "{{ [ns.x, ns.x] | unique }}", "{{ [ns.x, ns.x] | sort }}", "{{ ns.x | string }}",
             "{{ dict([[ns.x, 1]]) }}", "{% for a in [1, 2] %}{{ loop.changed(ns.x) }}{% endfor %}", "{{ [ns.x] | map('string') | list }}",
             "{{ 1 in [ns.x] }}"]
LONG_USES = ["{% set y = x[::2] %}{% endfor %}", "{% set y = x.upper() %}{% endfor %}", "{% set y = 'b' in x %}{% endfor %}",
             "{% set y = x | e %}{% endfor %}", "{% set y = x < x %}{% endfor %}", "{% set y = x is lower %}{% endfor %}",
             "{% set y = x | int %}{% endfor %}"]
WORK = ["{{ 'x' * 300000000 }}", "{{ 300000000 * 'x' }}", "{{ [0] * 300000000 }}", "{% for i in range(10**9) %}{% endfor %}",
        "{{ range(10**9) | list }}",
        "{% for i in range(10**5) %}{% for j in range(10**5) %}{% for k in range(10**5) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x'.join(range(10**9)) }}", "{{ range(10**9) | join('x') }}", "{{ range(10**9) | sum }}", "{{ range(10**7) | map('string') | list }}",
        "{{ [[1] * 1000] * 1000 }}", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        TWICE % ("'a'", "ns.x + ns.x"), TWICE % ("'a'", "ns.x ~ ns.x"), TWICE % ("'a'", "ns.x.replace('a', 'aaaa')"), TWICE % ("[1]", "ns.x + ns.x"),
        TWICE % ("'a'", "[ns.x, ns.x] | join"), TWICE % ("'a'", "ns.x.join([ns.x, ns.x])"), TWICE % ("'a'", "'{}{}'.format(ns.x, ns.x)"),
        TWICE % ("'a'", "'%s%s' % (ns.x, ns.x)"), *(PAIRS + use for use in PAIR_USES), PAIRS + "{% set a = ns.x %}" + PAIRS + "{{ a == ns.x }}",
        "{% set l = [1] %}{% for i in l %}{% set _ = l.append(i) %}{% endfor %}", *(LONG + use for use in LONG_USES),
        "{% set x = 'a' * 30000 %}{{ x.rfind('ab' + x) }}", "{% set x = 'a' * 9000 %}{{ x.strip('b' * 9000 + 'a') | length }}",
        "{{ ('a' * 8000) | list | tojson(indent=16) | length }}",
        "{% set x = 'a ' * 9000 %}{% for i in range(99) %}{% set y = x.split() %}{% endfor %}", "{{ ('a\\n' * 5000) | indent(99) | length }}",
        "{{ 'a' | indent(10**9, true) }}", "{{ ('a' * 5000).join('b' * 5000) | length }}", "{{ strftime_now('%c' * 5000) | length }}",
        "{% for i in range(50) %}" + "a" * 60000 + "{% endfor %}", "{% for i in range(9000) if [i] * 9 %}{% endfor %}",
        "".join(f"{{% set a{i} = 1 %}}" for i in range(1000)) + "{% for i in range(2000) %}{% endfor %}",
        "{% set x = '%s' * 500 %}{% for i in range(99) %}{% set y = x % ((i,) * 500) %}{% endfor %}"]
REFUSED = ["{{ " + "+".join("a" * 3000) + " }}", "{{ " + "(" * 5000, "{{ " + "[" * 5000, "{{ " + "not " * 5000 + "a }}", "{% if a %}" * 2000,
           "a" * (MAX_SOURCE + 1), "{{ 9**9**9 }}", "{{ 2**250 * 2**250 }}", "{{ (-8)**0.5 }}", "{{ 9" + "9" * 100 + " }}",
           "{{ ('f' * 1000) | int(0, 16) }}", "{{ 5 | round(-10**9) }}", "{{ 5.5 | round(10**9, 'ceil') }}", "{{ '{:>999999999}'.format('a') }}",
           "{{ '{0:{1}}'.format('a', 999999999) }}", "{{ '{0.__class__}'.format(1) }}", "{{ '%999999999s' % 'x' }}", "{{ '%*d' % (999999999, 1) }}",
           "{{ '%(a)999999999s' % {'a': 1} }}", "{{ '%999999999d' is odd }}", "{{ '%999999999d' is divisibleby 3 }}",
           "{{ '%999999999s' | format('x') }}", "{{ strftime_now('%999999999Y') }}", "{{ [[]] | tojson(indent=10**9) }}",
           "{{ [1, 2] | tojson(separators=('a' * 999, '')) }}", "{{ range(10**9) | batch(3) }}", "{{ 'a' | center(10**9) }}",
           "{{ 'a'.center(10**9) }}", "{{ 'a'.ljust(10**9) }}", "{{ 'a'.zfill(10**9) }}", "{{ 'a\\t'.expandtabs(10**9) }}",
           "{{ (1).to_bytes(10**9) }}", "{{ lipsum(10**9) }}", "{{ ''.__class__.__mro__ }}", "{{ namespace.__init__.__globals__ }}",
           "{{ messages.__class__.__base__ }}", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ {2**61 - 1: 1, 2 * (2**61 - 1): 2} }}",
           TWICE.replace("60", "900") % ("[]", "[ns.x]") + "{{ ns.x }}", TWICE.replace("60", "900") % ("()", "(ns.x,)") + "{{ ns.x in {} }}",
           "{% set l = [1] %}{{ l.append(l) }}{{ l | tojson }}", "{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}",
           "{% for a in b recursive %}{% endfor %}", "{{ 1_1" + "_1" * 5000 + " }}", "{% for a in b %}" * 99 + "{% endfor %}" * 99]

# a process of its own has a peak of memory of its own; a sixteenth of the budget keeps the tests short: 65536 steps, beside what reading takes
CHILD = """
import json, resource, sys
from tinygrad.apps import template
template.STEPS >>= 4
for source in json.load(sys.stdin):
  try: found = "rendered " + template.Template(source).render({"messages": [{"role": "user", "content": "x"}]})[:80]
  except Exception as e: found = type(e).__name__ + ": " + str(e)
  print(json.dumps([source[-80:], found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1 << 20 if sys.platform == "darwin" else 1 << 10)]))
"""
def failures(sources: list[str]) -> list[str]:
  """How each template fails, within limits that only a hang or a hoard breaks."""
  child = subprocess.run([sys.executable, "-c", CHILD], input=json.dumps(["{{ 1 }}", *sources]), stdout=subprocess.PIPE, text=True,
                         check=True, timeout=300)
  (_, _, first), *rest = map(json.loads, child.stdout.splitlines())
  assert len(rest) == len(sources)
  for source, found, peak in rest: assert not found.startswith("rendered") and peak < first + 32, (source, found, f"{peak} MB, {first} MB at first")
  return [found for _, found, _ in rest]

def test_work_is_bounded(): assert {*failures(WORK)} == {"TemplateError: more work than a template may make of these messages"}
def test_what_no_template_may_do(): assert not any("more work than" in found for found in failures(REFUSED))

def test_nothing_is_evaluated_at_load():
  for source in WORK[:3]: Template(source)
  Template("{% if false %}" + "".join(WORK[:3]) + "{{ 9**9**9 }}{{ raise_exception('no') }}{{ x | nosuchfilter }}{% endif %}").render({})
  with pytest.raises(Refusal, match="^no$"): Template("{{ raise_exception('no') }}").render({})

def test_a_long_conversation_is_no_attack():
  messages = [m for n in range(2000) for m in (user("What is it? " * 20), {"role": "assistant", "content": "<think>so\n</think>" + "This. " * 100})]
  text = Template(GLM).render({"messages": [*messages, user("x" * 3_000_000)]})
  assert text.count("<|user|>") == 2001 and len(text) > 4_000_000

def test_threads_share_a_template():
  template, out = Template(GLM), []
  def work(n: int): out.extend((n, template.render({"messages": [user(str(n))] * 20, "add_generation_prompt": True})) for _ in range(20))
  threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
  for t in threads: t.start()
  for t in threads: t.join()
  assert len(out) == 80 and all(text == "[gMASK]<sop>" + f"<|user|>{n}" * 20 + "<|assistant|><think>" for n, text in out)

def test_input_is_not_changed():
  values = {"messages": [user("x")], "l": [1]}
  Template("{% set ns = namespace(m=messages) %}{% set ns.m = [] %}{% set messages = 1 %}").render(values)
  assert values == {"messages": [user("x")], "l": [1]}
