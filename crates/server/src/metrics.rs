//! Prometheus metrics, each explained in docs/METRICS.md. Names of vLLM's are there as aliases: llm-d and the Gateway API
//! Inference Extension read them.

use crate::served::Served;
use engine::{BLOCK_TOKENS, Protection, Stats};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

type Ratio = Gauge<f64, AtomicU64>;
type Labels = Vec<(&'static str, String)>;
type By = Family<Labels, Counter>;
type ByNow = Family<Labels, Gauge>;

/// See the module's page.
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    kv_use: Ratio,
    kv_blocks: ByNow,
    cache_config: ByNow,
    promised: ByNow,
    geometries: ByNow,
    cache_hit_rate: Ratio,
    steps: Counter,
    generated: Counter,
    processed: Counter,
    cached: Counter,
    cache_hits: Counter,
    preemptions: Counter,
    admitted: By,
    waited: By,
    longest_wait: ByNow,
    protection_steps: By,
    rows: By,
    requests: By,
    /// Open connections.
    pub connections: Gauge,
    /// Those above the limit, so far.
    pub refused: Counter,
    first_token: Histogram,
    between_tokens: Histogram,
}

fn seconds() -> Histogram {
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    ])
}

impl Default for Metrics {
    fn default() -> Self {
        let mut m = Self {
            registry: Registry::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_use: Ratio::default(),
            kv_blocks: ByNow::default(),
            cache_config: ByNow::default(),
            promised: ByNow::default(),
            geometries: ByNow::default(),
            cache_hit_rate: Ratio::default(),
            steps: Counter::default(),
            generated: Counter::default(),
            processed: Counter::default(),
            cached: Counter::default(),
            cache_hits: Counter::default(),
            preemptions: Counter::default(),
            admitted: By::default(),
            waited: By::default(),
            longest_wait: ByNow::default(),
            protection_steps: By::default(),
            rows: By::default(),
            requests: By::default(),
            connections: Gauge::default(),
            refused: Counter::default(),
            first_token: seconds(),
            between_tokens: seconds(),
        };
        let mut r = Registry::default();
        let help = "Requests that hold KV";
        r.register("blocklock_requests_running", help, m.running.clone());
        r.register("vllm:num_requests_running", help, m.running.clone());
        let help = "Requests that wait, preempted ones included";
        r.register("blocklock_requests_waiting", help, m.waiting.clone());
        r.register("vllm:num_requests_waiting", help, m.waiting.clone());
        let help = "Part of the KV pool that running requests hold, 0 to 1";
        r.register("blocklock_kv_use", help, m.kv_use.clone());
        r.register("vllm:kv_cache_usage_perc", help, m.kv_use.clone());
        r.register("vllm:gpu_cache_usage_perc", help, m.kv_use.clone());
        r.register(
            "blocklock_kv_blocks",
            "KV blocks by state: used, cached or free",
            m.kv_blocks.clone(),
        );
        r.register(
            "vllm:cache_config_info",
            "Always 1; labels say how the KV pool is divided",
            m.cache_config.clone(),
        );
        r.register(
            "blocklock_promised",
            "Whether every geometry of a served protection keeps its promise on this device, 0 or 1",
            m.promised.clone(),
        );
        r.register(
            "blocklock_geometries",
            "Geometries of a served locked protection by state: held, broken or unknown",
            m.geometries.clone(),
        );
        let help =
            "Part of all prompt and answer tokens whose KV came from the prefix cache, 0 to 1";
        r.register("blocklock_cache_hit_rate", help, m.cache_hit_rate.clone());
        r.register(
            "blocklock_steps",
            "Steps that ran on the device",
            m.steps.clone(),
        );
        r.register(
            "blocklock_tokens_generated",
            "Tokens generated",
            m.generated.clone(),
        );
        r.register(
            "blocklock_tokens_processed",
            "Tokens computed, recomputed ones included",
            m.processed.clone(),
        );
        r.register(
            "blocklock_tokens_cached",
            "Tokens whose KV came from the prefix cache",
            m.cached.clone(),
        );
        r.register(
            "blocklock_cache_hits",
            "Admissions that found a cached prefix",
            m.cache_hits.clone(),
        );
        r.register(
            "blocklock_preemptions",
            "Requests put back into the queue",
            m.preemptions.clone(),
        );
        r.register(
            "blocklock_admitted",
            "Requests that left the queue, by protection",
            m.admitted.clone(),
        );
        r.register(
            "blocklock_waited_steps",
            "Steps they waited for that in all, by protection",
            m.waited.clone(),
        );
        r.register(
            "blocklock_longest_wait_steps",
            "Steps the one that waited longest did, by protection",
            m.longest_wait.clone(),
        );
        r.register(
            "blocklock_protection_steps",
            "Steps with launches of a protection's own; a step may count for several",
            m.protection_steps.clone(),
        );
        r.register(
            "blocklock_launch_rows",
            "Rows of launches by protection, filled with a token or padding",
            m.rows.clone(),
        );
        r.register(
            "blocklock_http_requests",
            "HTTP requests by path and status",
            m.requests.clone(),
        );
        r.register(
            "blocklock_connections",
            "Open connections",
            m.connections.clone(),
        );
        r.register(
            "blocklock_connections_refused",
            "Connections above the limit",
            m.refused.clone(),
        );
        let help = "From a request's arrival to each choice's first token";
        r.register(
            "blocklock_time_to_first_token_seconds",
            help,
            m.first_token.clone(),
        );
        r.register(
            "vllm:time_to_first_token_seconds",
            help,
            m.first_token.clone(),
        );
        let help = "Between two tokens of a choice";
        r.register(
            "blocklock_time_per_output_token_seconds",
            help,
            m.between_tokens.clone(),
        );
        r.register(
            "vllm:time_per_output_token_seconds",
            help,
            m.between_tokens.clone(),
        );
        m.registry = r;
        m
    }
}

impl Metrics {
    /// A token came: so long after its request, and so long after the token before it.
    pub fn token(&self, since_start: Duration, since_last: Option<Duration>) {
        match since_last {
            None => self.first_token.observe(since_start.as_secs_f64()),
            Some(gap) => self.between_tokens.observe(gap.as_secs_f64()),
        }
    }

    /// A model is served from now on.
    pub fn ready(&self, served: &Served) {
        for &protection in &served.protections {
            let by = ("protection", protection.name().to_string());
            let mut certified = served.certified.iter();
            let promised = match certified.find(|(p, _)| *p == protection) {
                None => protection == Protection::Invariant,
                Some((_, c)) => {
                    for (state, count) in [
                        ("held", c.held),
                        ("broken", c.broken),
                        ("unknown", c.unknown),
                    ] {
                        let labels = vec![by.clone(), ("state", state.into())];
                        self.geometries.get_or_create(&labels).set(count.into());
                    }
                    c.broken + c.unknown == 0
                }
            };
            self.promised.get_or_create(&vec![by]).set(promised.into());
        }
        let blocks = served.kv_tokens / BLOCK_TOKENS;
        let labels = vec![
            ("block_size", BLOCK_TOKENS.to_string()),
            ("num_gpu_blocks", blocks.to_string()),
        ];
        self.cache_config.get_or_create(&labels).set(1);
    }

    /// A request was answered.
    pub fn request(&self, path: &str, status: u16) {
        let labels = vec![("path", path.to_string()), ("status", status.to_string())];
        self.requests.get_or_create(&labels).inc();
    }

    /// The text of all, with the engine's counters as of now.
    pub fn text(&self, stats: Option<&Stats>) -> String {
        if let Some(s) = stats {
            self.note(s);
        }
        let mut text = String::new();
        let _ = encode(&mut text, &self.registry); // writing to a String does not fail
        text
    }

    fn note(&self, s: &Stats) {
        self.running.set(s.running as i64);
        self.waiting.set(s.waiting as i64);
        let blocks = (s.kv_used + s.kv_cached + s.kv_free).max(1);
        self.kv_use.set(s.kv_used as f64 / blocks as f64);
        for (state, count) in [
            ("used", s.kv_used),
            ("cached", s.kv_cached),
            ("free", s.kv_free),
        ] {
            let labels = vec![("state", state.to_string())];
            self.kv_blocks.get_or_create(&labels).set(count as i64);
        }
        let tokens = (s.cached_tokens + s.tokens_processed).max(1);
        self.cache_hit_rate
            .set(s.cached_tokens as f64 / tokens as f64);
        let store = |counter: &Counter, value: u64| counter.inner().store(value, Ordering::Relaxed);
        store(&self.steps, s.steps);
        store(&self.generated, s.tokens_generated);
        store(&self.processed, s.tokens_processed);
        store(&self.cached, s.cached_tokens);
        store(&self.cache_hits, s.cache_hits);
        store(&self.preemptions, s.preemptions);
        for protection in Protection::ALL {
            let p = s.of(protection);
            let label = ("protection", protection.name().to_string());
            let labels = vec![label.clone()];
            store(&self.admitted.get_or_create(&labels), p.admitted);
            store(&self.protection_steps.get_or_create(&labels), p.steps);
            store(&self.waited.get_or_create(&labels), p.waited_steps);
            self.longest_wait
                .get_or_create(&labels)
                .set(p.longest_wait_steps as i64);
            for (kind, rows) in [
                ("filled", p.filled_rows),
                ("padding", p.launched_rows - p.filled_rows),
            ] {
                let labels = vec![label.clone(), ("kind", kind.into())];
                store(&self.rows.get_or_create(&labels), rows);
            }
        }
    }
}
