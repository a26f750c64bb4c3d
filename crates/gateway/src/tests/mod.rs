mod build;
mod errors;
mod nat;
mod properties;
mod services;
