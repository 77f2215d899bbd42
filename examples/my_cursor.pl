#!/usr/bin/perl
# The same in Perl: a line for each ack, with a sum; synced by persist.
use strict; use warnings; use IO::Handle; use JSON::PP;

my ($log, %ledgers, @acked, @unsynced);
sub say_line { syswrite STDOUT, encode_json($_[0]) . "\n" }
sub synced { $_[0]->flush; $_[0]->sync or die "fsync: $!" }
sub sum { sprintf "%08x", unpack "%32C*", $_[0] }

sub recover {
    my ($directory, $whole) = ($_[0]{directory}, 0);
    %ledgers = %{ $_[0]{ledgers} };
    open $log, "+>>", "$directory/acks.log" or die "acks.log: $!";
    seek $log, 0, 0;
    while (my $line = <$log>) {
        last unless $line =~ /^(\w{8}) ((\d+) (\d+) (\d+) end\n)$/ && $1 eq sum($2);
        push @acked, [$3 + 0, $4 + 0, $5 + 0];
        $whole += length $line;
    }
    truncate $log, $whole or die "truncate: $!";
    synced($log);
    open my $names, "<", $directory or die "$directory: $!";
    synced($names);
}

sub ack {
    my ($ledger, $first, $end) = @_;
    my $line = "$ledger $first $end end\n";
    print $log sum($line), " ", $line;
    push @acked, [$ledger, $first, $end];
}

while (my $line = <STDIN>) {
    my $asked = decode_json($line);
    my ($op, $number, $ledger, $entry) = @$asked{qw(op number ledger entry)};
    if ($op eq "start") { recover($asked); say_line({ready => JSON::PP::true}); next }
    if ($op eq "recover") { recover($asked) }
    if ($op eq "recover" || $op eq "report") { say_line({acked => \@acked}); next }
    if ($op eq "ack") { ack($ledger, $entry, $entry + 1) }
    if ($op eq "mark_delete") {
        ack($_ + 0, 0, $ledgers{$_}) for grep { $_ < $ledger } keys %ledgers;
        ack($ledger, 0, $entry + 1);
    }
    if ($op eq "persist") { synced($log); say_line({durable => [splice @unsynced]}) }
    else { push @unsynced, $number }
    say_line({accepted => $number});
}
