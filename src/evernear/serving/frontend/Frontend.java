package evernear;

import io.grpc.InternalGlobalInterceptors;
import io.grpc.Server;
import io.netty.bootstrap.ServerBootstrap;
import io.netty.channel.Channel;
import io.netty.channel.ChannelFuture;
import io.netty.channel.ChannelOption;
import io.netty.channel.EventLoopGroup;
import io.netty.util.internal.logging.InternalLoggerFactory;
import io.netty.util.internal.logging.Slf4JLoggerFactory;
import java.io.IOException;
import java.lang.reflect.Field;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.apache.commons.cli.DefaultParser;
import org.apache.logging.log4j.LogManager;
import org.pytorch.serve.ModelServer;
import org.pytorch.serve.metrics.MetricCache;
import org.pytorch.serve.servingsdk.impl.PluginsManager;
import org.pytorch.serve.util.ConfigManager;
import org.pytorch.serve.util.Connector;
import org.pytorch.serve.util.ConnectorType;
import org.pytorch.serve.util.TokenAuthorization;

/**
 * TorchServe's frontend as evernear runs it: what TorchServe 0.12 has no switch for.
 *
 * <ul>
 *   <li>SIGTERM drains: no new connection, an answer to every request that came in, then the end.
 *   <li>Requests of one connection are answered in their order, one after the other.
 *   <li>Before a body is kept, its head has shown the token; bytes in flight, connections and waits have bounds.
 *   <li>Whatever cannot be read gets 4xx and a sentence, not a reset or a 500.
 *   <li>Where a process owns the server (serve --foreground), the server ends with it, even if it is killed.
 *   <li>In a pod, inference wants the token that all replicas share, and GET /ready tells whether predictions are
 *       answered.
 * </ul>
 */
public final class Frontend extends ModelServer {
    private static final Path OWNER_FILE = Path.of("owner.pid");
    private static final int OWNER_POLL_MS = 500;

    private final Traffic traffic = new Traffic();
    private final byte[] query;
    private Channel listener;

    private Frontend(ConfigManager config) throws IOException {
        super(config);
        String file = System.getProperty("evernear.query_file");
        query = file == null ? null : Files.readAllBytes(Path.of(file));
    }

    public static void main(String[] words) {
        try {
            ConfigManager.init(
                    new ConfigManager.Arguments(
                            new DefaultParser().parse(ConfigManager.Arguments.getOptions(), words, null, false)));
            TokenAuthorization.init();
            Token.share();
            PluginsManager.getInstance().initialize();
            MetricCache.init();
            InternalLoggerFactory.setDefaultFactory(Slf4JLoggerFactory.INSTANCE);
            Frontend frontend = new Frontend(ConfigManager.getInstance());
            Runtime.getRuntime().addShutdownHook(new Thread(frontend::drain, "drain"));
            InternalGlobalInterceptors.setInterceptorsTracers(
                    List.of(), List.of(new GrpcTraffic(frontend.traffic)), List.of());
            frontend.startRESTserver();
            frontend.startGRPCServers();
            System.out.println("Model server started.");
            endWithOwner();
        } catch (Throwable fault) {
            fault.printStackTrace();
            System.err.println(fault);
            Runtime.getRuntime().halt(1);
        }
    }

    /** A listener as TorchServe's own, except that it knows its connections, bounds them and resets none. */
    @Override
    public ChannelFuture initializeServer(
            Connector connector, EventLoopGroup acceptors, EventLoopGroup workers, ConnectorType type)
            throws InterruptedException {
        boolean infers = type == ConnectorType.INFERENCE_CONNECTOR;
        Channel bound =
                new ServerBootstrap()
                        .group(acceptors, workers)
                        .channel(connector.getServerChannel())
                        .option(ChannelOption.SO_BACKLOG, 1024)
                        .handler(new ConnectionLimit(infers ? Limits.CONNECTIONS : Limits.OTHER_CONNECTIONS))
                        .childOption(ChannelOption.SO_KEEPALIVE, true)
                        .childOption(ChannelOption.TCP_NODELAY, true)
                        .childOption(ChannelOption.ALLOW_HALF_CLOSURE, true)
                        .childHandler(new Pipeline(type, infers ? traffic : new Traffic(), query))
                        .bind(connector.getSocketAddress())
                        .sync()
                        .channel();
        if (infers) {
            listener = bound;
        }
        return bound.closeFuture();
    }

    /** The shutdown hook: refuse new connections, answer what came in, and end within the time that is given. */
    private void drain() {
        long deadline = System.nanoTime() + TimeUnit.SECONDS.toNanos(Long.getLong("evernear.drain_timeout_s", 30));
        try {
            if (listener != null) {
                // First of all: a connection that is told to end must not find its way back in.
                listener.close().sync();
            }
            Server rpc = rpcServer();
            if (rpc != null) {
                rpc.shutdown();
            }
            traffic.drain(deadline);
            if (rpc != null) {
                rpc.awaitTermination(deadline - System.nanoTime(), TimeUnit.NANOSECONDS);
            }
            LogManager.shutdown();
        } catch (InterruptedException | ReflectiveOperationException fault) {
            fault.printStackTrace();
        } finally {
            // TorchServe's own stop would idle for seconds; the workers end with their connection.
            Runtime.getRuntime().halt(0);
        }
    }

    private Server rpcServer() throws ReflectiveOperationException {
        Field field = ModelServer.class.getDeclaredField("inferencegRPCServer");
        field.setAccessible(true);
        return (Server) field.get(this);
    }

    private static void endWithOwner() throws InterruptedException, IOException {
        while (!Files.exists(OWNER_FILE)) {
            Thread.sleep(OWNER_POLL_MS);
        }
        long owner = Long.parseLong(Files.readString(OWNER_FILE).trim());
        ProcessHandle.of(owner).ifPresent(process -> process.onExit().join());
        System.exit(0);
    }
}

/** The inference token: of TorchServe's making, or the one that the replicas of a Service share. */
final class Token {
    private Token() {}

    /** Take the token from the file that is named, if one is; TorchServe checks it for REST and gRPC. */
    static void share() throws IOException, ReflectiveOperationException {
        String file = System.getProperty("evernear.token_file");
        if (file != null) {
            field().set(null, Files.readString(Path.of(file)).trim());
        }
    }

    /** What a request has to carry; null where tokens are off. */
    static String get() throws ReflectiveOperationException {
        return (String) field().get(null);
    }

    private static Field field() throws ReflectiveOperationException {
        Field field = TokenAuthorization.class.getDeclaredField("inferenceKey");
        field.setAccessible(true);
        return field;
    }
}

