//! Connections: so many at a time, each within limits of time and size.

use crate::explained::Explained;
use crate::metrics::Metrics;
use crate::server::Options;
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;

/// How long idle connections and slow readers may take once every answer is computed.
const LAST_BYTES: Duration = Duration::from_secs(5);
/// Connections above the limit that are told so at one time; further ones are closed.
const TOLD: usize = 64;
/// Bytes of an answer that the system keeps for a reader who takes them slowly.
const SEND_BUFFER: u32 = 256 << 10;
/// Open files besides connections.
const OTHER_FILES: u64 = 64;
/// The smallest limit of a head that hyper takes.
pub const LEAST_HEAD: usize = 8 << 10;

/// Binds an address that a server killed a moment ago may have had.
pub fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    }?;
    socket.set_reuseaddr(true)?;
    socket.set_send_buffer_size(SEND_BUFFER)?; // connections inherit it
    socket.bind(address)?;
    socket.listen(1024)
}

/// Raises this process's limit of open files, as far as it may, so that it holds so many connections.
pub fn allow_files(connections: usize) {
    let needed = connections as u64 + OTHER_FILES;
    let now = getrlimit(Resource::Nofile);
    if now.current.is_none_or(|current| current >= needed) {
        return;
    }
    let allowed = now.maximum.map_or(needed, |most| most.min(needed));
    let raised = Rlimit {
        current: Some(allowed),
        maximum: now.maximum,
    };
    if setrlimit(Resource::Nofile, raised).is_err() || allowed < needed {
        tracing::warn!(
            "{connections} connections need {needed} open files, more than this process may have"
        );
    }
}

/// Answers connections with `app`, those above the limit with `full`, until `told` ends; then lets them finish.
pub async fn serve(
    listener: TcpListener,
    options: &Options,
    metrics: &Metrics,
    app: Router,
    full: Router,
    told: impl Future<Output = ()>,
) {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(options.head_time) // counted while a connection is idle, too
        .max_buf_size(options.head_bytes.max(LEAST_HEAD));
    let slots = Arc::new(Semaphore::new(options.connections));
    let refusals = Arc::new(Semaphore::new(TOLD));
    let graceful = GracefulShutdown::new();
    let mut told = pin!(told);
    loop {
        let accepted = tokio::select! {
            _ = &mut told => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(e) => {
                // It may be this process that has no more files; those that run free some.
                tracing::warn!("a connection cannot be accepted: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (slot, app) = match Arc::clone(&slots).try_acquire_owned() {
            Ok(slot) => (slot, &app),
            Err(_) => {
                metrics.refused.inc();
                match Arc::clone(&refusals).try_acquire_owned() {
                    Ok(slot) => (slot, &full),
                    Err(_) => continue,
                }
            }
        };
        let service = TowerToHyperService::new(app.clone());
        let io = TokioIo::new(Explained::new(timed(stream, options.write_time)));
        let connection = graceful.watch(http.serve_connection(io, service));
        let open = metrics.connections.clone();
        open.inc();
        tokio::spawn(async move {
            let _slot = slot;
            if let Err(e) = connection.await {
                tracing::debug!("a connection broke off: {e}");
            }
            open.dec();
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_BYTES, graceful.shutdown()).await; // those that take longer are closed
}

/// A connection that breaks off when nothing it sends is taken for so long.
fn timed(stream: TcpStream, write_time: Duration) -> TimeoutStream<TcpStream> {
    // Events of a stream are small, and each is wanted at once.
    if let Err(e) = stream.set_nodelay(true) {
        tracing::warn!("a connection is slower than it could be: {e}");
    }
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(write_time));
    stream
}
