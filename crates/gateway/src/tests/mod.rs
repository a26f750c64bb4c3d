mod build;
mod errors;
mod fragments;
mod handover;
mod nat;
mod properties;
mod services;
mod shared;
