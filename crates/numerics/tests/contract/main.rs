//! The contract's scalar reference against exact values, independent rewritings and published answers.

mod math;
