"""Chat templates of the forms that GLM-4.7-Flash, DeepSeek-V3 and Kimi-K2 have, and conversations that go through every part of them."""
GLM = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>
{%- endif -%}
{%- macro seen(content) -%}
  {%- if content is string -%}
    {{- content }}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part is mapping and part.type == 'text' -%}{{- part.text }}{%- elif part is string -%}{{- part }}{%- endif -%}
    {%- endfor -%}
  {%- else -%}
    {{- content }}
  {%- endif -%}
{%- endmacro -%}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
  {%- if m.role == 'user' %}
    {% set last.user = loop.index0 -%}
  {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>{{ seen(m.content) }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set thought = '' %}
{%- set content = seen(m.content) %}
{%- if m.reasoning_content is string %}
  {%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
  {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
  {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > last.user) and thought -%}
{{ '<think>' + thought.strip() + '</think>' }}
{%- else -%}
{{ '</think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ content.strip() }}{%- endif -%}
{% if m.tool_calls %}
{% for call in m.tool_calls %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>' + call.name -}}
{% set given = call.arguments or {} %}{% for k, v in given.items() %}<arg_key>{{ k }}</arg_key><arg_value>
{{- v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else -%}
<|observation|>{% for r in m.content %}
<tool_response>{{ r.output if r.output is defined else r }}</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>{{ seen(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' -}}{%- endif -%}
"""
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- if not thinking is defined %}{% set thinking = enable_thinking | default(false) %}{% endif %}
{%- set ns = namespace(called=false, tool=false, system='', first=true, user=false) -%}
{%- for m in messages %}{%- if m['role'] == 'system' %}
  {%- if ns.first %}{% set ns.system = ns.system + m['content'] %}{% set ns.first = false %}
  {%- else %}{% set ns.system = ns.system + '

' + m['content'] %}{%- endif %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for m in messages -%}
  {%- if m['role'] == 'user' %}{% set ns.tool = false %}{% set ns.user = true %}{{ '<｜User｜>' + m['content'] }}{%- endif -%}
  {%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none -%}
    {%- if ns.user %}{{ '<｜Assistant｜></think>' }}{%- endif %}{% set ns.user = false %}{% set ns.called = false %}
    {%- for call in m['tool_calls'] -%}
      {{- '' if ns.called else m['content'] + '<｜tool▁calls▁begin｜>' -}}
      {{- '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' ~ call['function']['arguments'] ~ '<｜tool▁call▁end｜>' }}
      {%- set ns.called = true -%}
    {%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- endif -%}
  {%- if m['role'] == 'assistant' and (m['tool_calls'] is not defined or m['tool_calls'] is none) -%}
    {%- if ns.user %}{{ '<｜Assistant｜>' }}{{ '<think>' if m['prefix'] is defined and m['prefix'] and thinking else '</think>' }}{%- endif -%}
    {%- set ns.user = false -%}
    {%- set content = m['content'] -%}
    {%- if not ns.tool and '</think>' in content %}{% set content = content.split('</think>', 1)[1] %}{%- endif -%}
    {%- set ns.tool = false %}{{ content + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
  {%- if m['role'] == 'tool' %}{% set ns.user = false %}{% set ns.tool = true -%}
    {{ '<｜tool▁output▁begin｜>' ~ m['content'] ~ '<｜tool▁output▁end｜>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.user and not ns.tool %}{{ '<｜Assistant｜>' }}{{ '<think>' if thinking else '</think>' }}{% endif %}"""
KIMI = """{% macro write(m) -%}
  {%- set c = m.get('content') -%}
  {%- if c is string -%}{{ c }}
  {%- elif c is not none -%}
    {% for part in c -%}
      {% if part['type'] == 'image' or 'image' in part -%}<|media_start|>image<|media_end|>{% else -%}{{ part['text'] }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro %}
{%- macro calls(m) -%}
  <|tool_calls_section_begin|>
  {%- for call in m['tool_calls'] -%}
    <|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
    {%- set given = call['function']['arguments'] -%}
    {%- if given is string %}{{ given }}{% else %}{{ given | tojson }}{% endif -%}
    <|tool_call_end|>
  {%- endfor -%}
  <|tool_calls_section_end|>
{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for i in range(messages|length-1, -1, -1) -%}
  {%- if messages[i]['role'] == 'assistant' and not messages[i].get('tool_calls') -%}{%- set ns.last = i -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{%- set old = messages[:ns.last+1] -%}
{%- set new = messages[ns.last+1:] -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- if messages|length == 0 or messages[0]['role'] != 'system' -%}
  <|im_system|>system<|im_middle|>You help.<|im_end|>
{%- endif -%}
{%- for part in [old, new] -%}{%- for m in part -%}
  {%- set name = m.get('name') or m['role'] -%}
  {%- if m['role'] == 'user' -%}<|im_user|>{{ name }}<|im_middle|>
  {%- elif m['role'] == 'assistant' -%}<|im_assistant|>{{ name }}<|im_middle|>
  {%- else -%}<|im_system|>{{ name }}<|im_middle|>{%- endif -%}
  {%- if m['role'] == 'assistant' -%}
    <think>{{ m.get('reasoning_content', '') if loop.index0 > ns.last else '' }}</think>{{ write(m) }}
    {%- if m.get('tool_calls') -%}{{ calls(m) }}{%- endif -%}
  {%- elif m['role'] == 'tool' -%}
    ## Return of {{ m.tool_call_id }}
{{ write(m) }}
  {%- elif m['content'] is not none -%}{{ write(m) }}{%- endif -%}
  <|im_end|>
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""
FORMS = {"glm": GLM, "deepseek": DEEPSEEK, "kimi": KIMI}

TOOLS = [{"type": "function", "function": {"name": "weigh", "description": "Weighs a <thing>, größer als 1 g", "parameters": {
  "type": "object", "properties": {"thing": {"type": "string"}, "unit": {"type": "string", "enum": ["g", "kg"]}}, "required": ["thing"]}}}]
def user(text): return {"role": "user", "content": text}
def call(n: int, arguments) -> dict: return {"id": f"functions.weigh:{n}", "type": "function", "function": {"name": "weigh", "arguments": arguments}}
def result(n: int, content) -> dict: return {"role": "tool", "tool_call_id": f"functions.weigh:{n}", "content": content}
TALKS = {
  "one": [user("How heavy is an é?")],
  "turns": [{"role": "system", "content": "Be brief."}, user("One?"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo. "},
            user(" Three? ")],
  "reasoning": [user("One?"), {"role": "assistant", "content": "Two.", "reasoning_content": "\nwhy not\n"}, user("Three?")],
  "call": [user("How heavy?"), {"role": "assistant", "content": "", "tool_calls": [call(0, {"thing": "pear", "n": [1, None, True, 0.5]})]},
           result(0, "150 g"), {"role": "assistant", "content": "150 g."}, user("And two?")],
  "calls": [user("How heavy?"), {"role": "assistant", "content": "Let me see.", "reasoning_content": "two",
                                 "tool_calls": [call(0, {"thing": "pear"}), call(1, {"thing": "plum"})]}, result(0, "150 g"), result(1, "50 g")],
  "encoded": [user("How heavy?"), {"role": "assistant", "content": "", "tool_calls": [call(0, '{"thing": "pear"}')]},
              result(0, [{"output": "150 g"}])],
  "parts": [user([{"type": "text", "text": "a"}, {"type": "image", "image": "x.png"}])],
  "systems": [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, user("One?")],
  "none": [],
}
VARIABLES = [{}, {"tools": TOOLS}, {"enable_thinking": False}, {"enable_thinking": True, "clear_thinking": False, "thinking": True, "tools": TOOLS},
             {"add_generation_prompt": False}]
