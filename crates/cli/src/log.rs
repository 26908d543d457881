//! The log on standard error: warnings; of a server also a line a request, with times.

use crate::args::{Cli, Command, LogFormat};
use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// Lines that wait for a standard error whose reader is slow; further ones are lost, so that serving goes on.
const MOST_WAITING: usize = 8192;
/// How long the last lines may take.
const LAST_LINES: Duration = Duration::from_secs(1);

static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Hands each line to a thread that writes it.
struct Lines(SyncSender<Vec<u8>>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        WAITING.fetch_add(1, Ordering::SeqCst);
        if self.0.try_send(line.to_vec()).is_err() {
            WAITING.fetch_sub(1, Ordering::SeqCst);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Starts the log that a call asks for.
pub fn start(cli: &Cli) {
    let format = match &cli.command {
        Command::Serve(args) => Some(args.log_format),
        _ => None,
    };
    let filter = match std::env::var("BLOCKLOCK_LOG") {
        Ok(filter) => filter,
        Err(_) if cli.global.verbose || format.is_some() && !cli.global.quiet => "info".into(),
        Err(_) => "warn".into(),
    };
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(stderr().is_terminal())
        .log_internal_errors(false); // a log that cannot be written must not end what runs
    let Some(format) = format else {
        let _ = log.with_writer(stderr).without_time().try_init(); // the first
        return;
    };
    let (sender, lines) = sync_channel::<Vec<u8>>(MOST_WAITING);
    let writer = std::thread::Builder::new().name("log".into());
    let started = writer.spawn(move || {
        for line in lines {
            let _ = stderr().write_all(&line); // a full disk
            WAITING.fetch_sub(1, Ordering::SeqCst);
        }
    });
    if started.is_err() {
        return; // no thread for a log: there will be none for an engine either, which says so
    }
    let log = log.with_writer(move || Lines(sender.clone()));
    let _ = match format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(false)
            .try_init(),
    };
}

/// Waits for the last lines, unless nobody takes them.
pub fn finish() {
    let start = Instant::now();
    while WAITING.load(Ordering::SeqCst) > 0 && start.elapsed() < LAST_LINES {
        std::thread::sleep(Duration::from_millis(1));
    }
}
