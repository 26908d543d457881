//! What is kept of one request: a line in the log when it is over, and the histograms of its tokens. Neither holds a
//! prompt, an answer, a query string or a key.

use crate::metrics::Metrics;
use engine::Protection;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Status in the log of a request whose client went away before an answer.
const GONE: u16 = 499;

/// See the module's page.
pub struct Account {
    id: String,
    method: String,
    path: String,
    metrics: Arc<Metrics>,
    start: Instant,
    said: Mutex<Said>,
}

#[derive(Default)]
struct Said {
    status: Option<u16>,
    code: Option<&'static str>,
    asked: Option<Asked>,
    cached: usize,
    generated: usize,
    first: Option<Instant>,
    /// Of each choice.
    last: Vec<Option<Instant>>,
    finish: Vec<Option<&'static str>>,
}

/// What a request for tokens asks.
pub struct Asked {
    pub model: String,
    pub protection: Protection,
    pub stream: bool,
    pub choices: usize,
    pub prompt_tokens: usize,
}

impl Account {
    /// A request that came now; `path` is a route's, not what was typed.
    pub fn new(id: String, method: String, path: String, metrics: Arc<Metrics>) -> Self {
        Self {
            id,
            method,
            path,
            metrics,
            start: Instant::now(),
            said: Mutex::default(),
        }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner) // plain values: always whole
    }

    /// How it was answered.
    pub fn answered(&self, status: u16, code: Option<&'static str>) {
        self.metrics.request(&self.path, status);
        let mut said = self.said();
        said.status = Some(status);
        said.code = code;
    }

    /// It is queued.
    pub fn asked(&self, asked: Asked) {
        let mut said = self.said();
        said.last = vec![None; asked.choices];
        said.finish = vec![None; asked.choices];
        said.asked = Some(asked);
    }

    /// A choice left the queue.
    pub fn admitted(&self, cached: usize) {
        let mut said = self.said();
        said.cached = said.cached.max(cached);
    }

    /// A choice got a token.
    pub fn token(&self, choice: usize) {
        let now = Instant::now();
        let mut said = self.said();
        said.generated += 1;
        said.first.get_or_insert(now);
        let last = said.last.get_mut(choice).and_then(|l| l.replace(now));
        self.metrics.token(now - self.start, last.map(|l| now - l));
    }

    /// A choice ended.
    pub fn finished(&self, choice: usize, why: &'static str) {
        if let Some(finish) = self.said().finish.get_mut(choice) {
            *finish = Some(why);
        }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let said = self.said();
        // Probes come every few seconds; they are of interest where they fail.
        let probe = ["/live", "/health", "/metrics"].contains(&self.path.as_str());
        let fine = said.status == Some(200);
        if probe && fine && !tracing::enabled!(target: "request", tracing::Level::DEBUG) {
            return;
        }
        let ms = |to: Instant| (to - self.start).as_micros() as f64 / 1e3;
        let asked = said.asked.as_ref();
        let finish = asked.map(|_| {
            let each = said.finish.iter().map(|f| f.unwrap_or("cancelled"));
            let each: BTreeSet<&str> = each.collect();
            each.into_iter().collect::<Vec<_>>().join(",")
        });
        tracing::info!(
            target: "request",
            request_id = self.id,
            method = self.method,
            path = self.path,
            status = said.status.unwrap_or(GONE),
            code = said.code,
            model = asked.map(|a| a.model.as_str()),
            protection = asked.map(|a| a.protection.name()),
            stream = asked.map(|a| a.stream),
            choices = asked.map(|a| a.choices),
            prompt_tokens = asked.map(|a| a.prompt_tokens),
            cached_tokens = asked.map(|_| said.cached),
            output_tokens = asked.map(|_| said.generated),
            finish = finish.as_deref(),
            first_token_ms = said.first.map(ms),
            ms = ms(Instant::now()),
        );
    }
}
