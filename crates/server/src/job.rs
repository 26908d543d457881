//! A request in the engine: submitted, its choices followed to their ends, cancelled when dropped.

use crate::account::{self, Account};
use crate::answer::{Answer, Finish, Piece};
use crate::ask::{Asked, Prompt, Source};
use crate::calls::CallScanner;
use crate::conversation::Chat;
use crate::error::ApiError;
use crate::format::{Format, SCHEMA};
use crate::grammar::{BROKE, Compiled, GrammarError};
use crate::served::{Promise, Served};
use crate::server::Options;
use crate::tools::{Family, Tools};
use axum::http::StatusCode;
use engine::{EngineHandle, Event, Protection, Refusal, Request, RequestId, SubmitError};
use model::RenderOptions;
use numerics::sample::SamplingParams;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, channel, error::TrySendError};
use tokio::time::{Sleep, sleep_until};

/// See the module's page.
pub struct Job {
    pub served: Arc<Served>,
    pub asked: Asked,
    /// Token ids of each prompt. Choice i belongs to prompt i / n.
    pub prompts: Vec<Vec<u32>>,
    /// The protection it runs under.
    pub protection: Protection,
    /// What each choice is promised.
    pub promises: Vec<Promise>,
    pub answers: Vec<Answer>,
    account: Arc<Account>,
    events: Events,
    running: Running,
    deadline: Pin<Box<Sleep>>,
}

/// Events of all choices, each with its index.
struct Events {
    receiver: Receiver<(usize, Event)>,
    /// More came than a slow reader may leave waiting.
    behind: Arc<AtomicBool>,
}

/// Requests in the engine; dropped ones are cancelled.
struct Running {
    engine: EngineHandle,
    ids: Vec<RequestId>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ids.iter().for_each(|&id| self.engine.cancel(id)); // nothing where one has ended
    }
}

impl Job {
    /// Turns what is asked into requests and queues them. Blocks for up to a step of the engine.
    pub fn start(
        served: &Arc<Served>,
        options: &Options,
        account: Arc<Account>,
        asked: Asked,
    ) -> Result<Self, ApiError> {
        let start = Instant::now();
        if let Some(name) = asked.model.as_ref().filter(|m| **m != served.name) {
            return Err(ApiError::new(
                StatusCode::NOT_FOUND,
                "model_not_found",
                format!(
                    "model '{name}' does not exist; this server has '{}'",
                    served.name
                ),
            ));
        }
        if !asked.stop.is_empty() && served.tokenizer.is_none() {
            let why = "needs a tokenizer, and this model has none; use stop_token_ids";
            return Err(ApiError::unsupported("stop", why));
        }
        let family = family(served, asked.conversation())?; // before the template meets what it does not know
        let prompts = prompt_ids(served, &asked)?;
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let max_tokens = limit(served, options, &asked, longest)?;
        let grammar = grammar(served, &asked, family)?;
        let asks = asked.protection.unwrap_or(served.protection);
        let (mut protection, mut downgraded) = (asks, None);
        loop {
            let grammar = grammar.as_ref();
            match Self::submit(
                served, options, &asked, &prompts, max_tokens, protection, grammar,
            ) {
                Ok((mut promises, running, events)) => {
                    if let Some(reason) = downgraded {
                        promises.iter_mut().for_each(|p: &mut Promise| {
                            p.reason = format!("downgraded from {asks}: {reason}")
                        });
                    }
                    account.asked(account::Asked {
                        model: served.name.clone(),
                        protection,
                        stream: asked.stream,
                        choices: prompts.len() * asked.n as usize,
                        prompt_tokens: prompts.iter().map(Vec::len).sum(),
                    });
                    let tokenizer = served.tokenizer.as_deref();
                    let answers = each_choice(&prompts, &asked)
                        .map(|(prompt, _)| {
                            let echoed = asked.echo.then(|| prompt.to_vec());
                            let reported = asked.logprobs.is_some() || asked.token_ids;
                            Answer::new(tokenizer, &asked.stop, echoed, reported)
                                .calling(calls(&asked, family))
                        })
                        .collect();
                    return Ok(Self {
                        served: Arc::clone(served),
                        asked,
                        prompts,
                        protection,
                        promises,
                        answers,
                        account,
                        events,
                        running,
                        deadline: Box::pin(sleep_until((start + options.request_time).into())),
                    });
                }
                Err(Refused::Engine(SubmitError::Refused(
                    refusal @ Refusal::Unavailable { .. },
                ))) if options.allow_downgrade && protection != Protection::None => {
                    downgraded = Some(refusal.to_string());
                    protection = Protection::None;
                }
                Err(Refused::Engine(error)) => return Err(error.into()),
                Err(Refused::Here(error)) => return Err(error),
            }
        }
    }

    fn submit(
        served: &Served,
        options: &Options,
        asked: &Asked,
        prompts: &[Vec<u32>],
        max_tokens: usize,
        protection: Protection,
        grammar: Option<&Compiled>,
    ) -> Result<(Vec<Promise>, Running, Events), Refused> {
        let unavailable = |reason: &str| {
            let reason = reason.into();
            SubmitError::Refused(Refusal::Unavailable { protection, reason })
        };
        if !served.protections.contains(&protection) {
            return Err(Refused::Engine(unavailable(
                "this server does not serve it",
            )));
        }
        let mut stop_tokens = asked.stop_tokens.clone();
        if !asked.ignore_eos {
            stop_tokens.extend(served.tokenizer.iter().flat_map(|t| t.eos()));
        }
        let rows_from = |prompt: &[u32]| match (asked.echo, asked.logprobs) {
            (true, Some(_)) => Some(0),
            (true, None) if max_tokens == 0 => prompt.len().checked_sub(1),
            _ => None,
        };
        let mut running = Running {
            engine: served.engine.clone(),
            ids: Vec::new(),
        };
        // A whole reply needs all of its tokens anyhow.
        let rows = |(prompt, _): (&[u32], _)| rows_from(prompt).map_or(0, |_| prompt.len());
        let rows: usize = each_choice(prompts, asked).map(rows).sum();
        let (sender, receiver) = channel(match asked.stream {
            true => options.backlog + rows,
            false => Semaphore::MAX_PERMITS,
        });
        let behind = Arc::new(AtomicBool::new(false));
        let events = Events {
            receiver,
            behind: Arc::clone(&behind),
        };
        let choices = || {
            each_choice(prompts, asked).map(|(prompt, choice)| {
                let sampling = asked.sampling.clone();
                (prompt, SamplingParams { choice, ..sampling })
            })
        };
        let promises: Vec<Promise> = choices()
            .map(|(prompt, sampling)| {
                let mut promise = (served.promises)(protection, prompt, &sampling);
                if let (Some(key), Some(grammar)) = (&mut promise.key, grammar) {
                    *key = held_key(key, grammar);
                }
                promise
            })
            .collect();
        let requests = choices().enumerate().map(|(index, (prompt, sampling))| {
            let (sender, behind) = (sender.clone(), Arc::clone(&behind));
            let sink = move |event| {
                let sent = sender.try_send((index, event));
                if matches!(sent, Err(TrySendError::Full(_))) {
                    behind.store(true, Ordering::Relaxed);
                }
                sent.is_ok() && !behind.load(Ordering::Relaxed)
            };
            let request = Request {
                sampling,
                stop_tokens: stop_tokens.clone(),
                prompt_rows_from: rows_from(prompt),
                cache_salt: asked.cache_salt.clone(),
                grammar: grammar.map(|g| g.grammar.clone()),
                log_sum_exp: asked.logprobs.is_some(),
                ..Request::new(prompt.to_vec(), protection, max_tokens)
            };
            (request, Box::new(sink) as engine::thread::Sink)
        });
        let mut refused = None;
        for id in served.engine.submit_all(requests) {
            match id {
                Ok(id) => running.ids.push(id),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        if let Some(error) = refused {
            return Err(Refused::Engine(error)); // the others are cancelled
        }
        // After the engine's own refusals, which say more.
        let broken = promises.iter().find(|p| !p.promised);
        let broken = broken.filter(|_| protection != Protection::None && !options.allow_downgrade);
        if let Some(promise) = broken {
            let why = format!("{protection} cannot be kept: {}", promise.reason);
            return Err(Refused::Here(ApiError::field("protection", why)));
        }
        Ok((promises, running, events))
    }

    /// What happens next, and to which choice; `None` after the last choice's end.
    pub async fn next(&mut self) -> Option<Result<(usize, Piece), ApiError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same, where somebody polls.
    pub fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<(usize, Piece), ApiError>>> {
        let Some(open) = self.answers.iter().position(|a| a.finish.is_none()) else {
            return Poll::Ready(None);
        };
        let event = match self.events.receiver.poll_recv(cx) {
            Poll::Ready(event) => event,
            Poll::Pending if self.deadline.as_mut().poll(cx).is_ready() => {
                let piece = self.time_is_over(open);
                return Poll::Ready(Some(Ok((open, piece))));
            }
            Poll::Pending => return Poll::Pending,
        };
        Poll::Ready(Some(self.take(event)))
    }

    /// Ends an answer as far as it has come.
    fn time_is_over(&mut self, choice: usize) -> Piece {
        self.running.engine.cancel(self.running.ids[choice]);
        self.account.finished(choice, Finish::Timeout.name());
        self.answers[choice].end(self.served.tokenizer.as_deref(), Finish::Timeout)
    }

    /// Takes an event of the engine's.
    fn take(&mut self, event: Option<(usize, Event)>) -> Result<(usize, Piece), ApiError> {
        let tokenizer = self.served.tokenizer.as_deref();
        if self.events.behind.load(Ordering::Relaxed) {
            let why = "the answer broke off: its reader takes tokens too slowly";
            return Err(ApiError::broken(why));
        }
        let Some((choice, event)) = event else {
            return Err(ApiError::broken("the engine ended unexpectedly"));
        };
        match &event {
            Event::Admitted { cached_tokens } => self.account.admitted(*cached_tokens),
            Event::Token { .. } => self.account.token(choice),
            _ => {}
        }
        let answer = &mut self.answers[choice];
        let ended = answer.finish.is_some();
        let piece = match answer.take(tokenizer, event) {
            Ok(piece) => piece,
            Err(why) => {
                self.account.finished(choice, "failed");
                return Err(self.broke(&why));
            }
        };
        if let (false, Some(finish)) = (ended, answer.finish) {
            self.account.finished(choice, finish.name());
            self.running.engine.cancel(self.running.ids[choice]); // a stop string; else it has ended
        }
        Ok((choice, piece))
    }
}

impl Job {
    /// Why an answer broke off: its grammar asked too much, or something here failed.
    fn broke(&self, why: &str) -> ApiError {
        let field = match self.asked.format {
            Format::Text => "tools",
            Format::Json(_) => "response_format",
        };
        match why.strip_prefix(BROKE) {
            Some(why) => ApiError::unsupported(field, format!("too complex to be kept: {why}")),
            None => ApiError::broken(format!("the answer broke off: {why}")),
        }
    }
}

/// Who refused.
enum Refused {
    Engine(SubmitError),
    Here(ApiError),
}

/// Every choice: its prompt, and which of that one's choices it is.
fn each_choice<'a>(
    prompts: &'a [Vec<u32>],
    asked: &Asked,
) -> impl Iterator<Item = (&'a [u32], u32)> {
    let n = asked.n;
    let of = move |prompt: &'a Vec<u32>| (0..n).map(move |choice| (&prompt[..], choice));
    prompts.iter().flat_map(of)
}

fn prompt_ids(served: &Served, asked: &Asked) -> Result<Vec<Vec<u32>>, ApiError> {
    let ids = |prompt: &Prompt| match (prompt, &served.tokenizer) {
        (Prompt::Ids(ids), _) => Ok(ids.clone()),
        (Prompt::Text(text), Some(tokenizer)) => tokenizer
            .encode(text, true, true)
            .map_err(|e| ApiError::field("prompt", e)),
        (Prompt::Text(_), None) => Err(ApiError::unsupported(
            "prompt",
            "this model has no tokenizer; give token ids",
        )),
    };
    match &asked.source {
        Source::Prompts(prompts) => prompts.iter().map(ids).collect(),
        Source::Chat(chat) => Ok(vec![chat_ids(served, chat)?]),
    }
}

/// How the model writes calls, where the conversation has any tools; refuses them where it knows none.
pub fn family(served: &Served, chat: Option<&Chat>) -> Result<Option<Family>, ApiError> {
    let chat = chat.filter(|chat| chat.has_tools());
    let (Some(chat), Some(template)) = (chat, &served.template) else {
        return Ok(None);
    };
    let field = match chat.tools.shown() {
        Some(_) => "tools",
        None => "messages",
    };
    let family = Family::of(template).map_err(|why| ApiError::unsupported(field, why))?;
    Ok(Some(family))
}

/// Looks for calls in an answer that may hold some.
fn calls(asked: &Asked, family: Option<Family>) -> Option<CallScanner> {
    let tools = &asked.conversation()?.tools;
    tools.shown()?;
    let names = tools.list.iter().map(|t| t.name.clone()).collect();
    Some(CallScanner::new(family?, names))
}

/// The grammar an answer is held to, if any.
fn grammar(
    served: &Served,
    asked: &Asked,
    family: Option<Family>,
) -> Result<Option<Compiled>, ApiError> {
    let tools = asked.conversation().map(|chat| &chat.tools);
    let rules = tools.and_then(|tools| tools.rules(family?));
    let must_call = tools.is_some_and(Tools::must_call);
    let (lark, field) = match (&asked.format, rules) {
        (_, Some(rules)) if must_call => (format!("start: calls\n{rules}"), "tools"),
        (Format::Text, Some(rules)) => match tools.and_then(|tools| tools.free(family?)) {
            Some(start) => (format!("{start}{rules}"), "tools"),
            None => return Ok(None),
        },
        (Format::Text, None) => return Ok(None),
        (Format::Json(rule), None) => (format!("start: {rule}"), SCHEMA),
        (Format::Json(rule), Some(rules)) => {
            let lark = format!("start: answer | calls\nanswer: {rule}\n{rules}");
            (lark, "tools")
        }
    };
    let Some(tokenizer) = &served.tokenizer else {
        let why = "needs a tokenizer, and this model has none";
        return Err(ApiError::unsupported("response_format", why));
    };
    let compile = |lark: String| served.grammars.compile(tokenizer, lark);
    compile(lark).map(Some).map_err(|error| {
        // Of several schemas, the first that is at fault alone.
        let rules = tools.iter().flat_map(|tools| &tools.list);
        let fault = rules.enumerate().find_map(|(i, tool)| {
            let alone = compile(format!("start: {}", tool.arguments)).err()?;
            Some(alone.refuse(&format!("tools[{i}].function.parameters")))
        });
        match error {
            GrammarError::Vocabulary(_) => error.refuse("response_format"),
            _ if field == SCHEMA => error.refuse(SCHEMA),
            _ => fault.unwrap_or_else(|| error.refuse(SCHEMA)),
        }
    })
}

/// A key that covers what the answer is held to.
fn held_key(key: &str, grammar: &Compiled) -> String {
    let mut held = blake3::Hasher::new_derive_key("blocklock reproducibility-key with grammar v1");
    held.update(key.as_bytes())
        .update(grammar.digest.as_bytes());
    held.finalize().to_hex().to_string()
}

/// Token ids of a conversation, up to where the assistant's turn begins.
pub fn chat_ids(served: &Served, chat: &Chat) -> Result<Vec<u32>, ApiError> {
    let (Some(template), Some(tokenizer)) = (&served.template, &served.tokenizer) else {
        return Err(ApiError::unsupported(
            "messages",
            "this model has no chat template; use /v1/completions",
        ));
    };
    let options = RenderOptions {
        add_generation_prompt: true,
        tools: chat.tools.shown(),
        date: chat.date,
        variables: chat.variables.clone(),
    };
    template
        .encode(tokenizer, &chat.messages, &options)
        .map_err(|e| ApiError::field("messages", e))
}

/// Tokens to generate at most. A chat that names no limit gets what context, KV pool and server allow.
fn limit(
    served: &Served,
    options: &Options,
    asked: &Asked,
    prompt: usize,
) -> Result<usize, ApiError> {
    match asked.max_tokens {
        Some(given) if given > options.max_output_tokens => Err(ApiError::field(
            "max_tokens",
            format!(
                "is {given}, but this server allows at most {}",
                options.max_output_tokens
            ),
        )),
        Some(given) => Ok(given),
        None => {
            let room = served
                .facts
                .context
                .min(served.kv_tokens)
                .saturating_sub(prompt);
            Ok(room.clamp(1, options.max_output_tokens))
        }
    }
}
