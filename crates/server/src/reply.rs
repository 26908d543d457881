//! Replies in the OpenAI API's shapes: whole ones, and what chunks of a stream share with them.

use crate::answer::{Entry, Piece, token_text};
use crate::ask::{Prompt, Source, random};
use crate::conversation::now;
use crate::error::ApiError;
use crate::job::Job;
use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use tokio::task::block_in_place;

/// Reported tokens whose reply takes long to write, some ten milliseconds.
const MANY: usize = 500;

/// Waits for all choices.
pub async fn whole(mut job: Job) -> Result<Response, ApiError> {
    let mut pieces: Vec<Piece> = job.answers.iter().map(|_| Piece::default()).collect();
    let id = id(&job);
    while let Some(next) = job.next().await {
        let (choice, piece) = next?;
        pieces[choice].text += &piece.text;
        pieces[choice].calls.extend(piece.calls);
        pieces[choice].entries.extend(piece.entries);
    }
    let reported: usize = pieces.iter().map(|p| p.entries.len()).sum();
    Ok(match reported > MANY {
        // Others are answered meanwhile.
        true => block_in_place(|| written(&job, &id, pieces)),
        false => written(&job, &id, pieces),
    })
}

/// The reply of these answers.
fn written(job: &Job, id: &str, pieces: Vec<Piece>) -> Response {
    let chat = job.asked.chat();
    let choices: Vec<Value> = pieces
        .into_iter()
        .enumerate()
        .map(|(index, piece)| {
            let mut choice = json!({"index": index});
            if chat {
                choice["message"] = message(job, id, index, &piece);
            } else {
                choice["text"] = (echo(job, index) + &piece.text).into();
            }
            choice["logprobs"] = logprobs(job, &piece.entries);
            choice["finish_reason"] = job.answers[index].finish.map(|f| f.name()).into();
            if job.asked.token_ids {
                choice["token_ids"] = ids(job, index, &piece.entries);
            }
            choice["reproducibility_key"] = json!(job.promises[index].key);
            if job.prompts.len() > 1 {
                choice["reproducibility"] = promised(job, index); // its own prompt's
            }
            choice
        })
        .collect();
    let object = if chat {
        "chat.completion"
    } else {
        "text_completion"
    };
    let mut reply = head(job, id, object);
    reply["choices"] = choices.into();
    reply["usage"] = usage(job);
    extensions(job, 0, &mut reply);
    Json(reply).into_response()
}

/// An answer's message.
fn message(job: &Job, id: &str, choice: usize, piece: &Piece) -> Value {
    let mut calls: Vec<Value> = Vec::new();
    for part in &piece.calls {
        match (&part.name, calls.last_mut()) {
            (Some(name), _) => calls.push(json!({
                "id": call_id(job, id, choice, part.index),
                "type": "function",
                "function": {"name": name, "arguments": ""},
            })),
            (None, Some(call)) => {
                let so_far = call["function"]["arguments"].as_str().unwrap_or_default();
                call["function"]["arguments"] = (so_far.to_string() + &part.arguments).into();
            }
            (None, None) => {}
        }
    }
    let text = match piece.text.as_str() {
        "" if !calls.is_empty() => Value::Null,
        text => text.into(),
    };
    let mut message = json!({"role": "assistant", "content": text, "refusal": null});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    message
}

/// A call's id: a template may show it to the model later, so that equal answers have equal ones where that is promised.
pub fn call_id(job: &Job, id: &str, choice: usize, index: usize) -> String {
    let of = job.promises[choice].key.as_deref().unwrap_or(id);
    let hash = blake3::hash(format!("{of} {choice} {index}").as_bytes()).to_hex();
    format!("call_{}", &hash[..24])
}

pub fn id(job: &Job) -> String {
    let kind = if job.asked.chat() { "chatcmpl" } else { "cmpl" };
    format!("{kind}-{:016x}", random())
}

pub fn head(job: &Job, id: &str, object: &str) -> Value {
    json!({
        "id": id,
        "object": object,
        "created": now(),
        "model": job.served.name,
        "system_fingerprint": job.served.fingerprint(),
    })
}

/// What is said beside OpenAI's fields, of the promise that of one choice.
pub fn extensions(job: &Job, choice: usize, reply: &mut Value) {
    reply["seed"] = job.asked.sampling.seed.into();
    reply["reproducibility"] = promised(job, choice);
    if job.asked.token_ids {
        reply["prompt_token_ids"] = match &job.prompts[..] {
            [one] => json!(one),
            several => json!(several),
        };
    }
}

fn promised(job: &Job, choice: usize) -> Value {
    let promise = &job.promises[choice];
    let mut said = json!({
        "protection": job.protection.name(),
        "profile": job.served.facts.profile.name(),
        "geometry": promise.geometry,
        "numerics_id": job.served.numerics_id,
        "environment_id": job.served.environment_id,
        "key": promise.key,
        "promised": promise.promised,
        "reason": promise.reason,
    });
    let template = job.served.template.as_ref().filter(|t| t.reads_date());
    if let (Some(_), Some(chat)) = (template, job.asked.conversation()) {
        said["date"] = chat.date.map(|d| d.format("%Y-%m-%d")).into();
    }
    said
}

pub fn usage(job: &Job) -> Value {
    let prompt: usize = job.prompts.iter().map(Vec::len).sum();
    let completion: usize = job.answers.iter().map(|a| a.generated).sum();
    let first_of_each = job.answers.iter().step_by(job.asked.n as usize);
    let cached: usize = first_of_each.map(|a| a.cached).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

/// Which prompt a choice answers.
fn prompt_of(job: &Job, choice: usize) -> usize {
    choice / job.asked.n as usize
}

/// The prompt's text where it is echoed.
pub fn echo(job: &Job, choice: usize) -> String {
    let (at, ids) = (prompt_of(job, choice), &job.prompts[prompt_of(job, choice)]);
    let given = match &job.asked.source {
        Source::Prompts(prompts) => prompts.get(at),
        Source::Chat(_) => None,
    };
    match (given, &job.served.tokenizer) {
        _ if !job.asked.echo => String::new(),
        (Some(Prompt::Text(text)), _) => text.clone(),
        (_, Some(tokenizer)) => tokenizer.decode(ids, false),
        (_, None) => ids.iter().map(|t| format!("{t} ")).collect(),
    }
}

/// Generated tokens; an echoed prompt's are in `prompt_token_ids`.
pub fn ids(job: &Job, choice: usize, entries: &[Entry]) -> Value {
    let prompt = match job.asked.echo {
        true => job.prompts[prompt_of(job, choice)].len(),
        false => 0,
    };
    // Where the prompt's entries are reported, they come first, all together.
    let echoed = entries.iter().take_while(|e| e.row.is_none()).count();
    let skip = if echoed > 0 {
        entries.len().min(reported_prompt(job, prompt))
    } else {
        0
    };
    entries[skip..].iter().map(|e| e.token).collect()
}

fn reported_prompt(job: &Job, prompt: usize) -> usize {
    match job.asked.logprobs {
        Some(_) => prompt,
        None => prompt.min(1), // its first token has an entry always
    }
}

pub fn logprobs(job: &Job, entries: &[Entry]) -> Value {
    let Some(alternatives) = job.asked.logprobs else {
        return Value::Null;
    };
    if job.asked.chat() {
        chat_logprobs(job, entries, alternatives)
    } else {
        completion_logprobs(job, entries, alternatives)
    }
}

/// ln p of a token; OpenAI's floor stands for what JSON can't say.
fn logprob(logit: f32, log_sum_exp: Option<f32>) -> Option<f32> {
    match logit - log_sum_exp? {
        p if p.is_finite() => Some(p),
        _ => Some(-9999.0),
    }
}

/// The bits of a logit, as `generate --json` writes them.
fn bits(logit: f32) -> String {
    format!("{:#010x}", logit.to_bits())
}

fn chat_logprobs(job: &Job, entries: &[Entry], alternatives: usize) -> Value {
    let one = |text: &str, id: u32, logit: f32, lse: Option<f32>| {
        let tokenizer = job.served.tokenizer.as_ref();
        let bytes = match tokenizer.and_then(|t| t.bytes_of(id)) {
            Some(bytes) => Some(bytes),
            // A part of a character has no text of its own.
            None => (!text.contains('\u{fffd}')).then(|| text.into()),
        };
        let mut token = json!({"token": text, "logprob": logprob(logit, lse), "bytes": bytes});
        if job.asked.logit_bits {
            token["token_id"] = id.into();
            token["logit_bits"] = bits(logit).into();
        }
        token
    };
    let content: Vec<Value> = entries
        .iter()
        .filter_map(|e| {
            let row = e.row.as_ref()?;
            let mut token = one(&e.text, e.token, row.chosen_logit?, row.log_sum_exp);
            let top = row.top.iter().take(alternatives);
            token["top_logprobs"] = top
                .map(|&(id, z)| one(&text(job, id), id, z, row.log_sum_exp))
                .collect();
            Some(token)
        })
        .collect();
    json!({"content": content, "refusal": null})
}

fn completion_logprobs(job: &Job, entries: &[Entry], alternatives: usize) -> Value {
    let each = |f: &dyn Fn(&Entry) -> Value| entries.iter().map(f).collect::<Value>();
    let chosen = |e: &Entry| Some((e.row.as_ref()?.chosen_logit?, e.row.as_ref()?.log_sum_exp));
    let mut all = json!({
        "tokens": each(&|e| e.text.as_str().into()),
        "token_logprobs": each(&|e| chosen(e).and_then(|(z, lse)| logprob(z, lse)).into()),
        "top_logprobs": each(&|e| match &e.row {
            None => Value::Null,
            Some(row) => {
                let mut top = Map::new();
                for &(id, z) in row.top.iter().take(alternatives) {
                    // Of several tokens with one text, the most probable.
                    top.entry(text(job, id)).or_insert_with(|| json!(logprob(z, row.log_sum_exp)));
                }
                top.into()
            }
        }),
        "text_offset": each(&|e| e.offset.into()),
    });
    if job.asked.logit_bits {
        all["token_ids"] = each(&|e| e.token.into());
        all["token_logit_bits"] = each(&|e| chosen(e).map(|(z, _)| bits(z)).into());
        all["top_logit_bits"] = each(&|e| match &e.row {
            None => Value::Null,
            Some(row) => row
                .top
                .iter()
                .take(alternatives)
                .map(|&(id, z)| json!({"token_id": id, "logit_bits": bits(z)}))
                .collect(),
        });
    }
    all
}

fn text(job: &Job, id: u32) -> String {
    token_text(job.served.tokenizer.as_deref(), id)
}
