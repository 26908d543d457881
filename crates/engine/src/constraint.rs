//! Answers held to a grammar. The engine knows no texts: whoever asks says, token by token, what may come next.

use std::fmt;
use std::sync::Arc;

/// What answers are held to; each answer starts anew.
pub trait Grammar: Send + Sync {
    /// Follows one answer from its beginning.
    fn start(&self) -> Box<dyn Constraint>;
}

/// Follows one answer. A pure function of its grammar and the tokens taken: what it allows may depend on nothing else.
pub trait Constraint: Send {
    /// Tokens that may come next: id `i` is bit `i % 32` of word `i / 32`, ids beyond the words may not. An error ends the
    /// request.
    fn allowed(&mut self) -> Result<Vec<u32>, String>;

    /// Takes the next token, one that was allowed. True where nothing may follow it.
    fn take(&mut self, token: u32) -> Result<bool, String>;
}

/// A shared grammar; equal are only clones of one.
#[derive(Clone)]
pub struct SharedGrammar(pub Arc<dyn Grammar>);

impl PartialEq for SharedGrammar {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for SharedGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedGrammar")
    }
}

/// An answer's constraint, and what it allows next once that was asked.
pub(crate) struct Held {
    constraint: Box<dyn Constraint>,
    allowed: Option<Result<Vec<u32>, String>>,
}

impl Held {
    pub(crate) fn new(grammar: &SharedGrammar) -> Self {
        Self {
            constraint: grammar.0.start(),
            allowed: None,
        }
    }

    /// Whether [`Held::prepare`] has something to do.
    pub(crate) fn unprepared(&self) -> bool {
        self.allowed.is_none()
    }

    /// Finds out what is allowed next, once.
    pub(crate) fn prepare(&mut self) {
        if self.allowed.is_none() {
            self.allowed = Some(self.constraint.allowed());
        }
    }

    /// What is allowed next.
    pub(crate) fn allowed(&mut self) -> Result<&[u32], String> {
        self.prepare();
        match &self.allowed {
            Some(Ok(set)) => Ok(set),
            Some(Err(why)) => Err(why.clone()),
            None => Ok(&[]),
        }
    }

    /// Takes the token chosen; whether nothing may follow it.
    pub(crate) fn take(&mut self, token: u32) -> Result<bool, String> {
        self.allowed = None;
        self.constraint.take(token)
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Held")
    }
}
