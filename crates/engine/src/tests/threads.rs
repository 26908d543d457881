//! The engine behind its thread.

use super::fake::SharedLog;
use super::harness::*;
use crate::{
    EngineConfig, EngineHandle, EngineThread, Event, EventStream, FinishReason, SubmitError,
};
use std::time::{Duration, Instant};

fn start(blocks: usize) -> (EngineHandle, SharedLog) {
    let (engine, log) = fake_engine(blocks, EngineConfig::default());
    (EngineThread::spawn(engine).unwrap(), log)
}

fn answer(stream: EventStream) -> Answer {
    let id = stream.id();
    let mut record = Record::default();
    record.take(stream.map(|event| (id, event)).collect());
    record.answers.remove(&id).unwrap()
}

/// Waits until the engine has no request left.
fn wait_for_rest(handle: &EngineHandle) {
    let start = Instant::now();
    loop {
        let stats = handle.stats().unwrap();
        if stats.running + stats.waiting == 0 {
            assert_eq!(stats.kv_used, 0);
            return;
        }
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "requests stay: {stats:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn streams_from_many_threads_give_solo_answers() {
    let (handle, _) = start(60);
    let ask = |i: u64| {
        let handle = handle.clone();
        std::thread::spawn(move || {
            let request = invariant(i % 5, 40 + i as usize, 30);
            assert_eq!(
                answer(handle.submit(request.clone()).unwrap()),
                solo(&request)
            );
        })
    };
    let threads: Vec<_> = (0..16).map(ask).collect();
    threads.into_iter().for_each(|t| t.join().unwrap());
    handle.drain();
    assert!(matches!(
        handle.submit(invariant(1, 5, 5)),
        Err(SubmitError::Stopped(_))
    ));
}

#[test]
fn dropping_a_stream_and_cancelling_end_the_request() {
    let (handle, _) = start(200);
    drop(handle.submit(invariant(1, 100, 9_000)).unwrap());
    let mut stream = handle.submit(invariant(2, 100, 9_000)).unwrap();
    assert!(matches!(stream.recv(), Some(Event::Admitted { .. })));
    handle.cancel(stream.id());
    let last = stream.by_ref().last();
    assert_eq!(
        last,
        Some(Event::Finished {
            reason: FinishReason::Cancelled
        })
    );
    assert_eq!(stream.recv(), None);
    assert_eq!(stream.recv_timeout(Duration::ZERO), Ok(None));
    handle
        .submit_with(invariant(3, 100, 9_000), Box::new(|_| false))
        .unwrap();
    wait_for_rest(&handle);
}

#[test]
fn dropping_a_stream_frees_its_place_in_the_queue_at_once() {
    let config = EngineConfig {
        max_running: 1,
        ..EngineConfig::default()
    };
    let handle = EngineThread::spawn(fake_engine(200, config).0).unwrap();
    let running = handle.submit(invariant(1, 100, 9_000)).unwrap();
    drop(handle.submit(invariant(2, 100, 10)).unwrap());
    let stats = handle.stats().unwrap(); // asked after the drop, answered in order
    assert_eq!(stats.waiting + stats.running, 1, "{stats:?}");
    drop(running);
}

#[test]
fn refusals_come_through() {
    let (handle, _) = start(4);
    let refusal = handle.submit(invariant(1, 0, 5)).err().unwrap();
    assert_eq!(
        refusal.to_string(),
        "the prompt is empty; at least one token is needed"
    );
}

#[test]
fn a_device_failure_ends_every_request_and_names_the_cause() {
    let (handle, log) = start(200);
    let streams: Vec<_> = (0..5)
        .map(|i| handle.submit(invariant(i, 100, 9_000)).unwrap())
        .collect();
    log.lock().unwrap().fail = Some("the fan fell off".into());
    for stream in streams {
        let reason = FinishReason::Failed("the device failed: the fan fell off".into());
        assert_eq!(stream.last(), Some(Event::Finished { reason }));
    }
    let error = handle
        .submit(invariant(9, 10, 5))
        .err()
        .unwrap()
        .to_string();
    assert_eq!(
        error,
        "the engine has stopped: the device failed: the fan fell off"
    );
    assert!(handle.stats().is_err());
    handle.shutdown();
}

#[test]
fn a_panic_on_the_thread_still_ends_every_stream() {
    let (handle, log) = start(200);
    let stream = handle.submit(invariant(1, 100, 9_000)).unwrap();
    log.lock().unwrap().panic = true;
    let reason = FinishReason::Failed("the engine's thread ended unexpectedly".into());
    assert_eq!(stream.last(), Some(Event::Finished { reason }));
    assert!(handle.submit(invariant(1, 10, 5)).is_err());
    handle.shutdown();
}

#[test]
fn drain_lets_requests_end_and_shutdown_does_not() {
    let (handle, _) = start(60);
    let request = invariant(1, 100, 300);
    let stream = handle.submit(request.clone()).unwrap();
    handle.drain();
    assert_eq!(answer(stream), solo(&request));

    let (handle, _) = start(200);
    let stream = handle.submit(invariant(1, 100, 9_000)).unwrap();
    handle.shutdown();
    let reason = FinishReason::Failed("the engine was shut down".into());
    assert_eq!(stream.last(), Some(Event::Finished { reason }));
}
