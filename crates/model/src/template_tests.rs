//! Templates of the families served, in small, and the ways one can fail.

use crate::template::{ChatTemplate, Content, Message, RenderOptions, TemplateError};
use crate::template_date::DateTime;
use serde_json::json;

const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn render(
    source: &str,
    messages: &[Message],
    options: &RenderOptions,
) -> Result<String, TemplateError> {
    ChatTemplate::new(source)?.render(messages, options)
}

fn user(text: &str) -> Vec<Message> {
    vec![Message::new("user", text)]
}

fn plain(source: &str) -> String {
    render(source, &user("hi"), &RenderOptions::default()).unwrap()
}

fn parse(messages: serde_json::Value) -> Vec<Message> {
    serde_json::from_value(messages).unwrap()
}

#[test]
fn chatml_with_and_without_a_system_prompt() {
    let prompt = RenderOptions {
        add_generation_prompt: true,
        ..Default::default()
    };
    assert_eq!(
        render(CHATML, &user("a < b & \"c\""), &prompt).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\na < b & \"c\"<|im_end|>\n<|im_start|>assistant\n"
    );
    let turns = [
        Message::new("system", "S"),
        Message::new("user", "U"),
        Message::new("assistant", "A"),
    ];
    assert_eq!(
        render(CHATML, &turns, &RenderOptions::default()).unwrap(),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
    );
}

/// The constructs of Qwen3's template: reversed slices, a namespace, thinking cut out of earlier answers, tools as JSON.
const QWEN_LIKE: &str = r##"
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"##;

#[test]
fn tools_thinking_and_tool_calls() {
    let messages = parse(json!([
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nold\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": 1.0, "s": "<é>"}}},
            {"type": "function", "function": {"name": "g", "arguments": "{}"}}]},
        {"role": "tool", "content": "r1", "name": "f"},
        {"role": "tool", "content": "r2", "name": "g"},
    ]));
    let mut options = RenderOptions {
        tools: Some(vec![
            json!({"type": "function", "function": {"name": "f", "z": [1, true, null], "a": {}}}),
        ]),
        add_generation_prompt: true,
        ..Default::default()
    };
    options
        .variables
        .insert("enable_thinking".into(), json!(false));
    assert_eq!(
        render(QWEN_LIKE, &messages, &options).unwrap(),
        concat!(
            "<|im_start|>system\n# Tools\n<tools>\n",
            r#"{"type": "function", "function": {"name": "f", "z": [1, true, null], "a": {}}}"#,
            "\n</tools><|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n",
            "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1.0, \"s\": \"<é>\"}}\n</tool_call>\n",
            "<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call><|im_end|>\n",
            "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n",
            "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )
    );
}

/// The constructs of Llama 3's template: a default date, trimmed texts, `is not none`, slices of the messages.
const LLAMA_LIKE: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {{- message.tool_calls[0].function.arguments | tojson(indent=4) }}
    {%- endif %}
{%- endfor %}
"#;

#[test]
fn the_date_is_the_callers_or_the_templates_own() {
    let turns = [Message::new("system", " S "), Message::new("user", "\nU\n")];
    let mut options = RenderOptions::default();
    let text = |date: &str| {
        format!(
            "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: {date}\n\nS<|eot_id|>\
             <|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        )
    };
    options.variables.insert("bos_token".into(), json!("<s>"));
    assert_eq!(
        render(LLAMA_LIKE, &turns, &options).unwrap(),
        text("26 Jul 2024")
    );
    options.date = DateTime::parse_date("2026-02-03");
    assert_eq!(
        render(LLAMA_LIKE, &turns, &options).unwrap(),
        text("03 Feb 2026")
    );
}

#[test]
fn refusals_and_failures_name_the_line() {
    let two = parse(json!([{"role": "assistant", "tool_calls": []}]));
    let error = render(LLAMA_LIKE, &two, &RenderOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chat template refuses the conversation: This model only supports single tool-calls at once! (line 30)"
    );
    let messages = |source: &str| {
        let error = render(source, &user("hi"), &RenderOptions::default()).unwrap_err();
        let message = error.to_string();
        assert!(!message.contains('\n'), "{message}");
        message
    };
    assert!(messages("a\nb\n{% for %}").starts_with("chat template, line 3: syntax error"));
    assert!(messages("a\n{{ nothing.at_all }}").starts_with("chat template, line 2: undefined"));
    assert!(
        messages("{{ strftime_now('%d') }}").starts_with("chat template, line 1: unknown function")
    );
    assert!(
        messages("\n\n{{ messages[0].content.nope() }}").starts_with("chat template, line 3: ")
    );
}

#[test]
fn blocks_trim_loops_break_and_generation_is_transparent() {
    assert_eq!(plain("{% if true %}\n  x\n  {% endif %}\ny\n"), "  x\ny");
    assert_eq!(
        plain(
            "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        ),
        "023"
    );
    assert_eq!(
        plain("a {%- generation -%}  b {% endgeneration %}c"),
        "ab c"
    );
    assert_eq!(
        plain("{{ 'generation' }}{% set generation = 1 %}{{ generation }}"),
        "generation1"
    );
    assert_eq!(
        plain("{% macro m(a, b='z') %}{{ a ~ b }}{% endmacro %}{{ m('x') }}"),
        "xz"
    );
    assert_eq!(
        plain("{{ [1, none, true, 'a'] }}{{ none }}{{ false }}{{ 1.0 }}"),
        "[1, None, True, 'a']NoneFalse1.0"
    );
    assert_eq!(
        plain(
            "{{ missing }}{% if missing is defined %}x{% endif %}{% for a in missing %}{% endfor %}."
        ),
        "."
    );
    assert_eq!(
        plain(
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }};{% endfor %}{{ {'a': 1}.get('z', 'd') }}"
        ),
        "a=1;b=2;d"
    );
    assert_eq!(
        plain("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"),
        "1"
    );
    assert_eq!(
        plain(
            "{{ ' a,b '.strip().upper().replace(',', '-').title() }}{{ 'abc'[::-1] }}{{ 'abc'[1:] }}"
        ),
        "A-Bcbabc"
    );
}

#[test]
fn json_is_written_as_python_writes_it() {
    let mut options = RenderOptions::default();
    let value = json!({"b": [1, -2.5, 1e16, 1e-5, 100000.0, 1.5e300], "a": "é\u{1}\"\\\n<&>'", "c": {}, "d": []});
    options.variables.insert("v".into(), value);
    let text =
        |filter: &str| render(&format!("{{{{ v | {filter} }}}}"), &user(""), &options).unwrap();
    assert_eq!(
        text("tojson"),
        r#"{"b": [1, -2.5, 1e+16, 1e-05, 100000.0, 1.5e+300], "a": "é\u0001\"\\\n<&>'", "c": {}, "d": []}"#
    );
    assert_eq!(
        text("tojson(sort_keys=true, separators=(',', ':'), ensure_ascii=true)"),
        r#"{"a":"\u00e9\u0001\"\\\n<&>'","b":[1,-2.5,1e+16,1e-05,100000.0,1.5e+300],"c":{},"d":[]}"#
    );
    options
        .variables
        .insert("v".into(), json!({"a": [1, {"b": 2}]}));
    let text = render("{{ v | tojson(indent=2) }}", &user(""), &options).unwrap();
    assert_eq!(
        text,
        "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ]\n}"
    );
}

#[test]
fn dates() {
    let date = DateTime::from_unix(1_709_210_096); // 2024-02-29 12:34:56 UTC
    assert_eq!(
        date.format("%F %T|%A %a %B %b|%j %-d %e %y %I%p %%|%q"),
        "2024-02-29 12:34:56|Thursday Thu February Feb|060 29 29 24 12PM %|%q"
    );
    assert_eq!(
        DateTime::from_unix(0).format("%A %F"),
        "Thursday 1970-01-01"
    );
    assert_eq!(
        DateTime::from_unix(4_102_444_799).format("%F %T"),
        "2099-12-31 23:59:59"
    );
    assert_eq!(
        DateTime::parse_date("2000-02-29")
            .unwrap()
            .format("%a %-d %b"),
        "Tue 29 Feb"
    );
    for wrong in [
        "",
        "2023-02-29",
        "2024-13-01",
        "2024-00-10",
        "2024-1",
        "2024-01-01-01",
        "x",
    ] {
        assert_eq!(DateTime::parse_date(wrong), None, "{wrong}");
    }
}

#[test]
fn templates_are_found_in_a_models_folder() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let load = || ChatTemplate::from_dir(dir.path());
    assert!(load().unwrap().is_none());
    write("tokenizer_config.json", r#"{"chat_template": null}"#);
    assert!(load().unwrap().is_none());
    write("tokenizer_config.json", r#"{"chat_template": 3}"#);
    assert!(
        load()
            .unwrap_err()
            .to_string()
            .contains("neither a string nor a list")
    );
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}"#;
    write("tokenizer_config.json", list);
    let mut options = RenderOptions::default();
    let text = |options: &RenderOptions| {
        load()
            .unwrap()
            .unwrap()
            .render(&user("x"), options)
            .unwrap()
    };
    assert_eq!(text(&options), "D");
    options.tools = Some(vec![json!({})]);
    assert_eq!(text(&options), "T");
    write("chat_template.jinja", "J{{ messages[0].content }}");
    assert_eq!(text(&options), "Jx");
    assert_eq!(
        load().unwrap().unwrap().source(),
        "J{{ messages[0].content }}"
    );
}

#[test]
fn messages_take_the_forms_clients_send() {
    let messages = parse(json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant"},
    ]));
    assert!(matches!(messages[0].content, Some(Content::Parts(_))));
    let source = "{% for m in messages %}{% if m.content is none %}none{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
    assert_eq!(
        render(source, &messages, &RenderOptions::default()).unwrap(),
        "abnone"
    );
}
