"""Chat templates with calls of tools in the forms of Hermes and Qwen, of Llama 3 and of Mistral; and without."""

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n"
    'Write <tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function %}"
    "{{ '\n<tool_call>\n' }}"
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# One call alone, without a mark, in place of the content.
LLAMA = (
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|head|>ipython<|end|>{{ message.content }}<|eot|>"
    "{% elif message.tool_calls %}{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}<|head|>assistant<|end|>"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>'
    "{% else %}<|head|>{{ message.role }}<|end|>{{ message.content | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|end|>{% endif %}"
)
# A list behind a special token; ids of nine letters.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{% elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last }}{% endfor %}]{{ eos_token }}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
XML = HERMES.replace(
    '{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}',
    "<function={{ call.name }}>{% for key in call.arguments %}<{{ key }}>{{ call.arguments[key] }}{% endfor %}",
)
