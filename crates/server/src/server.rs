//! The server's life: bound, ready, draining, ended.

use crate::connections;
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::routes;
use crate::served::Served;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinHandle;

/// Limits and keys.
#[derive(Debug, Clone)]
pub struct Options {
    /// Connections at a time; further ones are answered with 503.
    pub connections: usize,
    /// Bytes of a request's line and headers at most; at least [`crate::LEAST_HEAD`].
    pub head_bytes: usize,
    /// Time to receive them, counted from a connection's start or the end of the answer before.
    pub head_time: Duration,
    /// Bytes of a body at most.
    pub body_bytes: usize,
    /// Tokens of an answer at most.
    pub max_output_tokens: usize,
    /// Time until an answer is cut.
    pub request_time: Duration,
    /// Time to receive a body.
    pub body_time: Duration,
    /// Time that a reader may take nothing until its connection is closed.
    pub write_time: Duration,
    /// Tokens of a stream that wait for a slow reader at most; then it is broken off.
    pub backlog: usize,
    /// Time for running answers to end once the server is told to stop.
    pub drain_time: Duration,
    /// Run what can't keep its promise, and say so, instead of refusing it.
    pub allow_downgrade: bool,
    /// BLAKE3 of the keys that open the API; empty: no key is needed.
    pub keys: Vec<blake3::Hash>,
}

/// What all handlers share.
pub struct Shared {
    pub options: Options,
    pub metrics: Arc<Metrics>,
    served: OnceLock<Arc<Served>>,
    draining: AtomicBool,
    in_flight: AtomicUsize,
}

/// Counts a request as running until dropped.
pub struct InFlight(Arc<Shared>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Shared {
    /// What is served; an error while starting or draining.
    pub fn served(&self) -> Result<&Arc<Served>, ApiError> {
        if self.draining.load(Ordering::SeqCst) {
            return Err(ApiError::unavailable("the server is draining"));
        }
        let starting = || ApiError::unavailable("the server is starting");
        self.served.get().ok_or_else(starting)
    }

    /// The same, whether draining or not.
    pub fn loaded(&self) -> Option<&Arc<Served>> {
        self.served.get()
    }

    /// Lets a request in.
    pub fn enter(self: &Arc<Self>) -> Result<(InFlight, Arc<Served>), ApiError> {
        self.in_flight.fetch_add(1, Ordering::SeqCst); // before looking, so that none slips past a drain
        let guard = InFlight(Arc::clone(self));
        let served = Arc::clone(self.served()?);
        Ok((guard, served))
    }
}

/// Threads that answer. The cores are the engine's; and where there are several, each token wakes another one in vain.
fn workers() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    (cores / 8).clamp(1, 4)
}

/// A bound server on threads of its own.
pub struct Server {
    runtime: Runtime,
    shared: Arc<Shared>,
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    /// Binds an address and answers from then on, though without a model. A signal that comes before the model does ends
    /// the process: nothing runs yet.
    pub fn bind(address: SocketAddr, options: Options) -> std::io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(workers())
            .thread_name("http")
            .enable_all()
            .build()?;
        let shared = Arc::new(Shared {
            options,
            metrics: Arc::default(),
            served: OnceLock::new(),
            draining: AtomicBool::new(false),
            in_flight: AtomicUsize::new(0),
        });
        let _entered = runtime.enter();
        let listener = connections::bind(address)?;
        let address = listener.local_addr()?;
        connections::allow_files(shared.options.connections);
        let told = Told::new(Arc::clone(&shared))?;
        let (app, full) = (
            routes::router(Arc::clone(&shared)),
            routes::full(Arc::clone(&shared)),
        );
        let task = runtime.spawn({
            let shared = Arc::clone(&shared);
            async move {
                let (options, metrics) = (&shared.options, &shared.metrics);
                connections::serve(listener, options, metrics, app, full, told.drained()).await
            }
        });
        drop(_entered);
        Ok(Self {
            runtime,
            shared,
            address,
            task,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The model is loaded: requests are taken from now on.
    pub fn ready(&self, served: Served) {
        self.shared.metrics.ready(&served);
        let _ = self.shared.served.set(Arc::new(served)); // once
    }

    /// Waits for SIGTERM or SIGINT, then for the answers that run.
    pub fn wait(self) -> std::io::Result<()> {
        let ended = self.runtime.block_on(self.task);
        if let Some(served) = self.shared.served.get() {
            served.engine.drain();
        }
        self.runtime.shutdown_timeout(Duration::from_secs(1));
        ended.map_err(std::io::Error::other)
    }
}

/// The signals that tell a server to stop.
struct Told {
    shared: Arc<Shared>,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Told {
    fn new(shared: Arc<Shared>) -> std::io::Result<Self> {
        Ok(Self {
            shared,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn signal(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Ends after a signal, once no answer runs any more. A second signal, or the end of the time for it, breaks off
    /// those that do.
    async fn drained(mut self) {
        self.signal().await;
        self.shared.draining.store(true, Ordering::SeqCst);
        let Some(served) = self.shared.served.get().map(Arc::clone) else {
            std::process::exit(0);
        };
        tracing::info!("draining");
        let shared = Arc::clone(&self.shared);
        let idle = async {
            while shared.in_flight.load(Ordering::SeqCst) > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let late = tokio::time::sleep(shared.options.drain_time);
        tokio::select! {
            _ = idle => return,
            _ = late => tracing::warn!("answers still run after the time to drain; they are broken off"),
            _ = self.signal() => tracing::warn!("a second signal: running answers are broken off"),
        }
        let engine = served.engine.clone();
        let _ = tokio::task::spawn_blocking(move || engine.shutdown()).await; // a panic there ended it as well
    }
}
