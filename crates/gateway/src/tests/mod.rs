mod build;
mod nat;
mod properties;
mod services;
