mod build;
mod errors;
mod fragments;
mod nat;
mod properties;
mod services;
mod shared;
