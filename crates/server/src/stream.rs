//! An answer as server-sent events: the body of its reply asks the job itself for what is new, so that nothing stands
//! between the engine and the connection.

use crate::answer::Piece;
use crate::error::ApiError;
use crate::job::Job;
use crate::reply::{call_id, echo, extensions, head, id, ids, logprobs, usage};
use crate::server::InFlight;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Serialize;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// After so long without an event, a comment shows that the connection lives.
const QUIET: Duration = Duration::from_secs(15);
/// Events that wait already are sent together, once they are so many bytes.
const TOGETHER: usize = 16 << 10;

/// The reply.
pub fn stream(job: Job, in_flight: InFlight) -> Response {
    let head = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (head, Body::new(Events::new(job, in_flight))).into_response()
}

/// A job's events. When the reader goes away this is dropped, and the job with it.
struct Events {
    job: Job,
    id: String,
    /// What every chunk says, but for its choices.
    head: Value,
    /// A chunk up to its choice.
    opening: Vec<u8>,
    /// Events not sent yet.
    text: Vec<u8>,
    /// Choices whose first chunk was written.
    begun: usize,
    ended: bool,
    /// When something was sent, and a while after that or after an earlier time.
    sent: Instant,
    quiet: Pin<Box<Sleep>>,
    _in_flight: InFlight,
}

/// What is new of a choice.
#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    logprobs: Value,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Value>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    content: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

impl Events {
    fn new(job: Job, in_flight: InFlight) -> Self {
        let object = match job.asked.chat() {
            true => "chat.completion.chunk",
            false => "text_completion",
        };
        let id = id(&job);
        let mut head = head(&job, &id, object);
        if job.asked.include_usage {
            head["usage"] = Value::Null;
        }
        let said = head.to_string();
        let fields = said.strip_suffix('}').unwrap_or_default(); // an object's end
        Self {
            id,
            opening: format!("data: {fields},\"choices\":[").into(),
            head,
            text: Vec::new(),
            begun: 0,
            ended: false,
            sent: Instant::now(),
            quiet: Box::pin(sleep(QUIET)),
            job,
            _in_flight: in_flight,
        }
    }

    /// The first chunk of the next choice, with what is said once.
    fn begin(&mut self) {
        let index = self.begun;
        self.begun += 1;
        let mut choice = json!({"index": index});
        if self.job.asked.chat() {
            choice["delta"] = json!({"role": "assistant", "content": ""});
        } else {
            choice["text"] = echo(&self.job, index).into();
        }
        choice["logprobs"] = Value::Null;
        choice["finish_reason"] = Value::Null;
        choice["reproducibility_key"] = json!(self.job.promises[index].key);
        let mut chunk = self.head.clone();
        chunk["choices"] = json!([choice]);
        extensions(&self.job, index, &mut chunk);
        self.event(&chunk);
    }

    fn event(&mut self, data: &Value) {
        self.text
            .extend_from_slice(format!("data: {data}\n\n").as_bytes());
    }

    /// Takes what comes next, and writes it if it is to be seen.
    fn take(&mut self, next: Option<Result<(usize, Piece), ApiError>>) {
        match next {
            Some(Ok((index, piece))) => self.piece(index, &piece),
            Some(Err(error)) => {
                self.event(&error.to_json());
                self.ended = true;
            }
            None => {
                if self.job.asked.include_usage {
                    let mut last = self.head.clone();
                    last["choices"] = json!([]);
                    last["usage"] = usage(&self.job);
                    self.event(&last);
                }
                self.text.extend_from_slice(b"data: [DONE]\n\n");
                self.ended = true;
            }
        }
    }

    fn piece(&mut self, index: usize, piece: &Piece) {
        let job = &self.job;
        let finish = job.answers[index].finish.map(|f| f.name());
        let nothing = piece.text.is_empty() && piece.calls.is_empty() && piece.entries.is_empty();
        if nothing && finish.is_none() {
            return;
        }
        let chat = job.asked.chat();
        let choice = Choice {
            index,
            delta: chat.then(|| Delta {
                content: &piece.text,
                tool_calls: call_deltas(job, &self.id, index, piece),
            }),
            text: (!chat).then_some(&piece.text),
            logprobs: match piece.entries.is_empty() {
                true => Value::Null,
                false => logprobs(job, &piece.entries),
            },
            finish_reason: finish,
            token_ids: (job.asked.token_ids).then(|| ids(job, index, &piece.entries)),
        };
        self.text.extend_from_slice(&self.opening);
        let _ = serde_json::to_writer(&mut self.text, &choice); // into memory, of such a type: it does not fail
        self.text.extend_from_slice(b"]}\n\n");
    }
}

/// What of an answer's calls is new.
fn call_deltas(job: &Job, id: &str, choice: usize, piece: &Piece) -> Vec<Value> {
    let deltas = piece.calls.iter().map(|part| match &part.name {
        Some(name) => json!({
            "index": part.index,
            "id": call_id(job, id, choice, part.index),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }),
        None => json!({"index": part.index, "function": {"arguments": part.arguments}}),
    });
    deltas.collect()
}

impl HttpBody for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        while !this.ended && this.text.len() < TOGETHER {
            if this.begun < this.job.answers.len() {
                this.begin();
                continue;
            }
            match this.job.poll_next(cx) {
                Poll::Ready(next) => this.take(next),
                Poll::Pending => break,
            }
        }
        if this.text.is_empty() && this.ended {
            return Poll::Ready(None);
        }
        // Set anew only when it is over: most events need not touch it.
        while this.text.is_empty() && this.quiet.as_mut().poll(cx).is_ready() {
            let due = this.sent + QUIET;
            if due <= Instant::now() {
                this.text.extend_from_slice(b":\n\n");
                this.quiet.as_mut().reset(Instant::now() + QUIET);
            } else {
                this.quiet.as_mut().reset(due);
            }
        }
        if this.text.is_empty() {
            return Poll::Pending;
        }
        this.sent = Instant::now();
        let text = std::mem::take(&mut this.text);
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }
}
