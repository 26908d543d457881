//! The engine on a thread of its own, behind channels.

use crate::engine::{Engine, Stats};
use crate::request::{Event, FinishReason, Refusal, Request, RequestId};
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Takes a request's events on the engine's thread; must not block. Returns false when nobody listens any more, which
/// cancels the request.
pub type Sink = Box<dyn FnMut(Event) -> bool + Send>;

enum Command {
    Submit(Request, Sink, Sender<Result<RequestId, SubmitError>>),
    Cancel(RequestId),
    Stats(Sender<Result<Stats, SubmitError>>),
    Drain,
    Shutdown,
}

/// Why the thread did not take a request.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The engine refused it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The engine takes no requests any more.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// Starts engine threads.
pub struct EngineThread;

impl EngineThread {
    /// Moves the engine to a thread of its own. Fails where the system gives no thread.
    pub fn spawn(engine: Engine) -> std::io::Result<EngineHandle> {
        let (commands, inbox) = mpsc::channel();
        let worker = Worker {
            engine,
            inbox,
            delivery: Delivery::default(),
            stopped: None,
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || worker.run())?;
        Ok(EngineHandle {
            commands,
            thread: Arc::new(Mutex::new(Some(thread))),
        })
    }
}

/// Reaches an engine's thread; clones reach the same one. The thread ends by `drain` or `shutdown`, or when the last
/// handle and the last stream are dropped.
#[derive(Clone)]
pub struct EngineHandle {
    commands: Sender<Command>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl EngineHandle {
    /// Queues a request; its events come through the stream.
    pub fn submit(&self, request: Request) -> Result<EventStream, SubmitError> {
        let (sender, events) = mpsc::channel();
        let id = self.submit_with(request, Box::new(move |event| sender.send(event).is_ok()))?;
        Ok(EventStream {
            id,
            events,
            finished: false,
            commands: self.commands.clone(),
        })
    }

    /// Queues a request whose events go to `sink`.
    pub fn submit_with(&self, request: Request, sink: Sink) -> Result<RequestId, SubmitError> {
        self.ask(|reply| Command::Submit(request, sink, reply))
    }

    /// Queues several requests; the answers come together, after a step at most, in the same order.
    pub fn submit_all(
        &self,
        requests: impl IntoIterator<Item = (Request, Sink)>,
    ) -> Vec<Result<RequestId, SubmitError>> {
        let asked: Vec<_> = requests
            .into_iter()
            .map(|(request, sink)| self.send(|reply| Command::Submit(request, sink, reply)))
            .collect();
        asked.into_iter().map(|a| receive(&a?)).collect()
    }

    /// Ends a request; its stream gets `Finished`. Nothing happens where it has ended already.
    pub fn cancel(&self, id: RequestId) {
        let _ = self.commands.send(Command::Cancel(id)); // a stopped engine has no requests
    }

    /// Counters and gauges; an error says why the engine stopped.
    pub fn stats(&self) -> Result<Stats, SubmitError> {
        self.ask(Command::Stats)
    }

    /// Refuses new requests, lets the others end, and waits for that.
    pub fn drain(&self) {
        self.stop(Command::Drain);
    }

    /// Ends all requests as failed and waits for the thread.
    pub fn shutdown(&self) {
        self.stop(Command::Shutdown);
    }

    fn stop(&self, command: Command) {
        let _ = self.commands.send(command); // where it has ended already, there is only the thread to join
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take() {
            let _ = thread.join(); // after a panic there, streams end as failed
        }
    }

    fn ask<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, SubmitError>>) -> Command,
    ) -> Result<T, SubmitError> {
        receive(&self.send(command)?)
    }

    fn send<T>(
        &self,
        command: impl FnOnce(Sender<Result<T, SubmitError>>) -> Command,
    ) -> Result<Receiver<Result<T, SubmitError>>, SubmitError> {
        let (reply, answer) = mpsc::channel();
        self.commands.send(command(reply)).map_err(|_| gone())?;
        Ok(answer)
    }
}

fn receive<T>(answer: &Receiver<Result<T, SubmitError>>) -> Result<T, SubmitError> {
    answer.recv().unwrap_or_else(|_| Err(gone()))
}

fn gone() -> SubmitError {
    SubmitError::Stopped("its thread has ended".into())
}

/// A request's events; the last is `Finished`, whatever happens. Dropping the stream cancels the request.
pub struct EventStream {
    id: RequestId,
    events: Receiver<Event>,
    finished: bool,
    commands: Sender<Command>,
}

impl EventStream {
    /// The request's id.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Waits for the next event; `None` after `Finished`.
    pub fn recv(&mut self) -> Option<Event> {
        if self.finished {
            return None;
        }
        Some(self.note(self.events.recv().unwrap_or_else(|_| engine_gone())))
    }

    /// As `recv`, but gives up after `timeout` with an error.
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Event>, RecvTimeoutError> {
        if self.finished {
            return Ok(None);
        }
        match self.events.recv_timeout(timeout) {
            Ok(event) => Ok(Some(self.note(event))),
            Err(RecvTimeoutError::Disconnected) => Ok(Some(self.note(engine_gone()))),
            Err(timeout) => Err(timeout),
        }
    }

    fn note(&mut self, event: Event) -> Event {
        self.finished = matches!(event, Event::Finished { .. });
        event
    }
}

impl Iterator for EventStream {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.recv()
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        if !self.finished {
            let _ = self.commands.send(Command::Cancel(self.id)); // a stopped engine has no requests
        }
    }
}

fn engine_gone() -> Event {
    Event::Finished {
        reason: FinishReason::Failed("the engine's thread ended unexpectedly".into()),
    }
}

struct Worker {
    engine: Engine,
    inbox: Receiver<Command>,
    delivery: Delivery,
    /// Why no requests are taken any more.
    stopped: Option<&'static str>,
}

/// Events on their way to those who listen. They go out while the device runs the next step.
#[derive(Default)]
struct Delivery {
    sinks: BTreeMap<RequestId, Sink>,
    events: Vec<(RequestId, Event)>,
    /// Requests that nobody listens to any more.
    deserted: Vec<RequestId>,
}

impl Delivery {
    fn hand_out(&mut self) {
        for (id, event) in self.events.drain(..) {
            let Some(sink) = self.sinks.get_mut(&id) else {
                continue;
            };
            let last = matches!(event, Event::Finished { .. });
            let listened = sink(event);
            if last || !listened {
                self.sinks.remove(&id);
            }
            if !listened {
                self.deserted.push(id);
            }
        }
    }
}

/// Whether the thread goes on.
type Goes = std::ops::ControlFlow<()>;

impl Worker {
    fn run(mut self) {
        let mut failure: Option<String> = None;
        loop {
            if self.take_commands(failure.as_deref()).is_break() {
                return;
            }
            let delivery = &mut self.delivery;
            match self.engine.step_beside(&mut || delivery.hand_out()) {
                Ok(events) => self.delivery.events.extend(events),
                Err(error) => {
                    let reason = format!("the device failed: {error}");
                    tracing::error!("{reason}");
                    let events = self.engine.fail_all(&reason);
                    self.delivery.events.extend(events);
                    failure = Some(reason);
                }
            }
            self.cancel_deserted();
        }
    }

    /// Takes the commands there are; waits for one while there is nothing else to do.
    fn take_commands(&mut self, failure: Option<&str>) -> Goes {
        loop {
            if self.engine.is_idle() {
                self.delivery.hand_out(); // no step is left beside which to do it
                self.cancel_deserted();
            }
            let command = if !self.engine.is_idle() {
                match self.inbox.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => return Goes::Continue(()),
                    Err(TryRecvError::Disconnected) => return Goes::Break(()), // nobody listens either
                }
            } else if self.stopped.is_some() {
                return Goes::Break(());
            } else {
                match self.inbox.recv() {
                    Ok(command) => command,
                    Err(_) => return Goes::Break(()),
                }
            };
            match command {
                Command::Submit(request, sink, reply) => {
                    let answer = match failure.or(self.stopped) {
                        Some(reason) => Err(SubmitError::Stopped(reason.into())),
                        None => self.engine.submit(request).map_err(SubmitError::from),
                    };
                    if let Ok(id) = answer {
                        self.delivery.sinks.insert(id, sink);
                    }
                    if reply.send(answer.clone()).is_err() {
                        answer.iter().for_each(|&id| self.cancel(id)); // the caller died while asking
                    }
                }
                Command::Cancel(id) => self.cancel(id),
                Command::Stats(reply) => {
                    let answer = match failure {
                        Some(reason) => Err(SubmitError::Stopped(reason.into())),
                        None => Ok(self.engine.stats()),
                    };
                    let _ = reply.send(answer); // the caller may have gone
                }
                Command::Drain => self.stopped = Some("it is draining"),
                Command::Shutdown => {
                    let events = self.engine.fail_all("the engine was shut down");
                    self.delivery.events.extend(events);
                    self.delivery.hand_out();
                    return Goes::Break(());
                }
            }
        }
    }

    fn cancel(&mut self, id: RequestId) {
        self.engine.cancel(id);
    }

    fn cancel_deserted(&mut self) {
        for id in self.delivery.deserted.drain(..) {
            self.engine.cancel(id); // nothing where it has ended
        }
    }
}
